"""A process of its own that generates with a TieredCache: family, socket, codec and prompts as JSON; prints JSON."""

from __future__ import annotations

import json
import sys

import torch

from kvstore.adapters.transformers import TieredOptions, TieredStore
from tests.adapters.models import build

family, socket, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = build(family)
rows = []
with TieredStore(model, socket, TieredOptions(block_tokens=16)) as store:
    for tokens in prompts:
        ids = torch.tensor([tokens])
        cache = store.cache(ids)
        answer = model.generate(ids, cache=cache, max_new_tokens=24, do_sample=False)
        rows.append({"answer": answer[0].tolist(), "loaded": cache.loaded})
    failures = store.client.failures()
print(json.dumps({"rows": rows, "failures": failures}))
