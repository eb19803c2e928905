"""Blocks that lie in HOST as int8 are attended to where they lie. How many tokens agree is reported only."""

from __future__ import annotations

from kvstore.core.types import Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from tests.engine.families import build_pair, random_prompt
from tests.engine.stores import Sizes, clear_tier, open_cache, open_store

GREEDY = SamplingParams(tokens_max=16, ignore_eos=True)


def test_int8_blocks_are_attended_to_in_place() -> None:
    pair = build_pair("llama", codec="int8")
    prompt = random_prompt(1, 300)
    expected = pair.greedy(prompt, 16)
    with open_store(pair.model.spec, Sizes(device=8, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache)
        (cold,) = engine.generate([prompt], GREEDY)
        assert cold.tokens == expected
        clear_tier(store, Tier.DEVICE)
        (warm,) = engine.generate([prompt], GREEDY)
        engine.close()
    assert warm.cached_tokens == {"host": 256}
    assert engine.counters.tokens_computed == 315 + 315 - 256
    agreeing = sum(a == b for a, b in zip(warm.tokens, expected, strict=True))
    print(f"int8: {agreeing} of 16 greedy tokens agree with fp32")
    # The first token depends on the prompt alone: a block read under the wrong codec would be noise.
    assert warm.tokens[0] == expected[0]


def test_a_running_request_goes_on_over_its_own_blocks_turned_int8() -> None:
    pair = build_pair("llama", codec="int8")
    prompt = random_prompt(2, 700)
    with open_store(pair.model.spec, Sizes(device=4, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=128))
        (answer,) = engine.generate([prompt], GREEDY)
        engine.close()
    expected = pair.greedy(prompt, 16)
    agreeing = sum(a == b for a, b in zip(answer.tokens, expected, strict=True))
    print(f"int8 while running: {agreeing} of 16 greedy tokens agree with fp32")
    assert answer.tokens[0] == expected[0]
    assert engine.counters.blocks_demoted > 0
    assert engine.counters.blocks_private == 0
