"""Tiers far too small: requests are demoted, preempted and come back, and every token equals transformers alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.sequence import FinishReason, RequestId
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.stores import Sizes, open_cache, open_store, pinned_bytes

TOKENS = 12


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """20 prompts of 1 to 3,000 tokens; most share one of two prefixes, of lengths on and off block borders."""
    rng = random.Random(5)
    stems = [random_prompt(100, 1500), random_prompt(101, 777)]
    lengths = [1, 2, 63, 64, 65, 128, 3000, 2048, *(rng.randint(100, 2000) for _ in range(12))]
    found = []
    for index, length in enumerate(lengths):
        shared = stems[index % 2][: rng.choice([0, 64, 500, 1500])][: length - 1]
        found.append([*shared, *random_prompt(200 + index, length - len(shared))])
    return found


@pytest.fixture(scope="module")
def expected(pair: Pair, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [pair.greedy(prompt, TOKENS) for prompt in prompts]


def run_with_random_arrival(engine: Engine, prompts: list[list[int]], seed: int) -> dict[int, tuple[int, ...]]:
    """Hand the prompts in at random steps, with random priorities; returns the tokens by index."""
    rng = random.Random(seed)
    arrivals = sorted((rng.randint(0, 40), index) for index in range(len(prompts)))
    ids: dict[RequestId, int] = {}
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    params = SamplingParams(tokens_max=TOKENS, ignore_eos=True)
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            _, index = arrivals.pop(0)
            ids[engine.add_request(prompts[index], params, priority=rng.randint(0, 2))] = index
        for output in engine.step():
            assert output.reason in (None, FinishReason.LENGTH)
            assert output.token is not None
            tokens[ids[output.request_id]].append(output.token)
        step += 1
    return {index: tuple(found) for index, found in tokens.items()}


@pytest.mark.parametrize(
    ("sizes", "preempts"),
    [
        (Sizes(device=32, host=450, ssd=2000), False),
        (Sizes(device=8, host=56, ssd=2000), True),
        (Sizes(device=60, host=8), True),
    ],
)
def test_tokens_equal_transformers_under_pressure(
    pair: Pair,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    sizes: Sizes,
    preempts: bool,
) -> None:
    with open_store(pair.model.spec, sizes, tmp_path) as store:
        with open_cache(store) as cache:
            config = EngineConfig(token_budget=320, running_max=20, private_bytes=1 << 26)
            engine = Engine(pair.model, cache, config)
            found = run_with_random_arrival(engine, prompts, seed=sizes.host)
            counters = engine.counters
            engine.close()
        assert found == dict(enumerate(expected))
        assert set(pinned_bytes(store).values()) == {0}
    print(sizes, counters)
    assert counters.blocks_demoted > 0
    assert (counters.preemptions > 0) is preempts
    assert sum(counters.tokens_from.values()) > 0
