"""Processes that differ in hash seed and locale compute the same keys, and hit all of each other's blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

WORKER = """
import json, sys
from kvstore.client import Client, ClientOptions
from tests.client.harness import blocks_of, chain, small_spec
with Client(sys.argv[1], ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
    spec = small_spec(model="modèle ß", rope='{"factor":8.0,"theta":500000.0}', salt="tenant ü".encode())
    opened = client.open_namespace(spec)
    keys, tokens = chain(opened.namespace_id, 40, seed=11)
    found = client.match(opened.namespace_id, keys).matched
    client.put(opened.namespace_id, blocks_of(opened.layout, keys, token_ids=tokens))
    print(json.dumps([found, [key.hex() for key in keys], hash("seed")]))
"""


def work(daemon, seed, locale):
    environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "LANG": locale}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(daemon.socket)], check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(done.stdout)


def test_all_shared_blocks_hit(daemon):
    first_found, first_keys, first_hash = work(daemon, "1", "C")
    found, keys, other_hash = work(daemon, "4711", "C.UTF-8")
    assert first_hash != other_hash
    assert keys == first_keys
    assert (first_found, found) == (0, 40)
