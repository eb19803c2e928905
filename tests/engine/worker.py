"""A process with an engine of its own over a daemon, for tests: ``python -m tests.engine.worker SOCKET PROMPTS``.

PROMPTS is a JSON list of lists of token ids. One JSON line is printed for each event: ``{"first": tokens computed}``
once every prompt has a token; then the answers, where their prefixes came from, and the counters. With a fourth
argument the first prompt is asked again once the cache is there, which it may have to come back for.
"""

from __future__ import annotations

import json
import sys

from kvstore.client import Backoff, Client, ClientOptions
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from tests.engine.families import build_pair


def main(socket: str, prompts: list[list[int]], tokens_max: int, repeat: bool) -> None:
    options = ClientOptions(name="worker", strict=True, backoff=Backoff(0.01, 0.05))
    with Client(socket, options) as client:
        engine = Engine(build_pair("llama").model, client, EngineConfig(retry_s=(0.0, 0.05)))
        params = SamplingParams(tokens_max=tokens_max, ignore_eos=True)
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        cached: dict[int, dict[str, int]] = {}
        told = False
        again: dict[str, int] = {}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token or 0)
                cached.setdefault(output.request_id, output.cached_tokens)
            if not told and all(tokens.values()):
                told = True
                print(json.dumps({"first": engine.counters.tokens_computed}), flush=True)
        if repeat:
            while not engine.cache_is_up:
                engine.generate([[1]], SamplingParams(tokens_max=1))
            engine.generate(prompts[:1], SamplingParams(tokens_max=1))
            again = engine.generate(prompts[:1], SamplingParams(tokens_max=1))[0].cached_tokens
        engine.close()
    answer = {
        "again": again,
        "tokens": [tokens[i] for i in ids],
        "cached": [cached[i] for i in ids],
        "counters": engine.counters.as_dict(),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4)
