"""Blocks that lie in HOST as int8 are attended to where they lie. How many tokens agree is reported only."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Area, Codec, Tier
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


def demoted_run(config: EngineConfig, device: int = 6) -> tuple[tuple[int, ...], tuple[int, ...], Engine]:
    """Greedy tokens of a request that does not fit into DEVICE, and those of the reference."""
    pair = build_pair("llama")
    prompt = random_prompt(3, 700)
    spec = config.spec_for(pair.model.spec)
    with open_store(spec, Sizes(device=device, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        (answer,) = engine.generate([prompt], GREEDY)
        engine.close()
    return answer.tokens, pair.greedy(prompt, 16), engine


def test_with_all_layers_raw_the_tokens_are_those_of_raw_blocks() -> None:
    config = EngineConfig(token_budget=128, codec="int8", raw_layers=(0, 1, 2))
    found, expected, engine = demoted_run(config)
    assert found == expected
    assert engine.counters.blocks_demoted > 0


@pytest.mark.parametrize("raw_layers", [(0,), (1,), (2,), (0, 2)])
def test_raw_layers_are_found_where_they_lie(raw_layers: tuple[int, ...]) -> None:
    found, expected, engine = demoted_run(EngineConfig(token_budget=128, codec="int8", raw_layers=raw_layers))
    # A layer read at a wrong place or under a wrong codec would be noise from the first token on.
    assert found[0] == expected[0]
    assert engine.counters.blocks_demoted > 0


def test_first_tokens_that_stay_raw_are_raw_where_they_are_moved_to() -> None:
    # 700 tokens have ten full blocks: with all of them raw the tokens are those of raw blocks.
    found, expected, engine = demoted_run(EngineConfig(token_budget=128, codec="int8", raw_first_tokens=640))
    assert found == expected
    assert engine.counters.blocks_demoted > 0
    found, expected, _ = demoted_run(EngineConfig(token_budget=128, codec="int8", raw_first_tokens=64))
    assert found[0] == expected[0]


@pytest.mark.parametrize("raw_layers", [(), (1,)])
def test_int8_on_device_is_attended_to_in_place(raw_layers: tuple[int, ...]) -> None:
    pair = build_pair("llama")
    config = EngineConfig(token_budget=128, codec="int8", raw_layers=raw_layers, device_codec="int8")
    spec, prompt = config.spec_for(pair.model.spec), random_prompt(5, 300)
    with open_store(spec, Sizes(device=8, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        (cold,) = engine.generate([prompt], GREEDY)
        (warm,) = engine.generate([prompt], GREEDY)
        device = next(tier for tier in store.status().tiers if tier.tier is Tier.DEVICE)
        encoded = store.status().counters["device_blocks_encoded"]
        # Down to HOST, neither decoded nor encoded again: the same bytes, so the same tokens.
        clear_tier(store, Tier.DEVICE)
        (host,) = engine.generate([prompt], GREEDY)
        engine.close()
    expected = pair.greedy(prompt, 16)
    assert encoded == 4
    assert device.used_bytes - device.reserved_bytes < device.raw_bytes
    assert cold.tokens[0] == warm.tokens[0] == expected[0]
    assert warm.cached_tokens == {"device": 256}
    assert host.cached_tokens == {"host": 256}
    assert host.tokens == warm.tokens
    assert engine.counters.blocks_private == 0


def test_a_long_request_runs_over_int8_on_device() -> None:
    found, expected, engine = demoted_run(EngineConfig(token_budget=128, codec="int8", device_codec="int8"), device=5)
    assert found[0] == expected[0]
    assert engine.counters.blocks_private == 0


def test_int8_on_device_and_a_raw_window_exclude_one_another() -> None:
    with pytest.raises(InvalidArgument, match="recent_raw_tokens"):
        EngineConfig(codec="int8", device_codec="int8", recent_raw_tokens=64)
    with pytest.raises(InvalidArgument, match="device_codec"):
        EngineConfig(device_codec="int4")


def test_the_recent_window_stays_on_device() -> None:
    pair = build_pair("llama", codec="int8")
    prompt = random_prompt(4, 700)
    config = EngineConfig(token_budget=128, recent_raw_tokens=128)
    seen = []
    with open_store(pair.model.spec, Sizes(device=6, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        engine.add_request(prompt, GREEDY)
        while engine.has_work:
            engine.step()
            for sequence in engine._scheduler:
                first = -(-max(0, sequence.computed - 128) // 64)
                recent = sequence.table.blocks[first:]
                assert all(block.area is Area.DEVICE and block.codec is Codec.RAW for block in recent)
                seen.append([block.area for block in sequence.table.blocks])
        engine.close()
    assert engine.counters.blocks_private == 0
    assert engine.counters.preemptions == 0
    assert seen[-1][:4] == [Area.HOST] * 4
    assert len(seen[-1]) == 12
