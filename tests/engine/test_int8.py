"""Blocks that lie in HOST as int8 are attended to where they lie. How many tokens agree is reported only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Area, Codec, Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.link import LinkLost
from kvstore.engine.sampling import SamplingParams
from tests.engine.families import build_pair, random_prompt
from tests.engine.stores import Sizes, clear_tier, open_cache, open_store, pinned_bytes

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


def test_a_wrong_device_codec_is_named() -> None:
    with pytest.raises(InvalidArgument, match="device_codec"):
        EngineConfig(device_codec="int4")


WRITABLE = (Area.DEVICE, Area.BUFFER)
"""Where a block of the window may lie: on DEVICE, or in the buffer until it is committed there."""
WINDOW = EngineConfig(token_budget=128, codec="int8", device_codec="int8", recent_raw_tokens=128)


@pytest.mark.parametrize("device", [6, 24])
def test_int8_on_device_with_a_raw_window(device: int) -> None:
    pair = build_pair("llama")
    spec, prompt = WINDOW.spec_for(pair.model.spec), random_prompt(6, 700)
    seen = []
    with open_store(spec, Sizes(device=device, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, WINDOW)
        engine.add_request(prompt, GREEDY)
        while engine.has_work:
            engine.step()
            for sequence in engine._scheduler:
                first = -(-max(0, sequence.computed - 128) // 64)
                blocks = sequence.table.blocks
                assert all(block.codec is Codec.INT8 for block in blocks[:first])
                assert all(b.area in WRITABLE and b.codec is Codec.RAW for b in blocks[first:])
                seen.append(len(blocks))
        # What the window held is committed at the end, and so found by the next request.
        (warm,) = engine.generate([prompt], GREEDY)
        engine.close()
    assert max(seen) == 12
    assert sum(warm.cached_tokens.values()) == 640
    assert warm.tokens[0] == pair.greedy(prompt, 1)[0]
    assert engine.counters.blocks_private == 0
    assert set(pinned_bytes(store).values()) == {0}


def test_a_raw_window_of_everything_gives_the_tokens_of_raw_blocks() -> None:
    pair = build_pair("llama")
    config = replace(WINDOW, recent_raw_tokens=4096)
    prompt = random_prompt(7, 300)
    with open_store(config.spec_for(pair.model.spec), Sizes(device=8, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        (cold,) = engine.generate([prompt], GREEDY)
        engine.close()
    assert cold.tokens == pair.greedy(prompt, 16)
    assert engine.counters.blocks_sealed == 4


def test_a_preempted_request_finds_what_its_window_held() -> None:
    pair = build_pair("llama")
    config = replace(WINDOW, recent_raw_tokens=4096)
    prompts = [random_prompt(8, 300), random_prompt(9, 300)]
    tokens: dict[int, list[int | None]] = {}
    with open_store(config.spec_for(pair.model.spec), Sizes(device=8, host=32)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        first = engine.add_request(prompts[0], GREEDY)
        outputs = [output for _ in range(4) for output in engine.step()]
        assert engine.counters.blocks_sealed == 0
        # It needs places of the first one, whose full blocks are committed before they are given up.
        second = engine.add_request(prompts[1], GREEDY, priority=1)
        while engine.has_work:
            outputs += engine.step()
        engine.close()
    for output in outputs:
        tokens.setdefault(output.request_id, []).append(output.token)
    assert engine.counters.preemptions == 1
    assert engine.counters.tokens_from["device"] + engine.counters.tokens_from["host"] == 256
    assert tuple(tokens[second]) == pair.greedy(prompts[1], 16)
    # Up to the preemption it saw raw blocks, after it the same blocks in int8.
    assert tuple(tokens[first][:2]) == pair.greedy(prompts[0], 2)
    assert len(tokens[first]) == 16


def test_a_request_that_gives_up_its_memory_while_the_link_is_lost_holds_none() -> None:
    pair = build_pair("llama")
    with open_store(WINDOW.spec_for(pair.model.spec), Sizes(device=8, host=16)) as store:
        cache = store.open_session("test", buffer_bytes=64 << 20)
        engine = Engine(pair.model, cache, replace(WINDOW, recent_raw_tokens=4096))
        request = engine.add_request(random_prompt(10, 200), GREEDY)
        engine.step()
        sequence = engine._scheduler.find(request)
        assert sequence is not None
        assert sequence.computed == 128
        # The commit of its full blocks fails, as any call of a session that is over does.
        cache.close()
        with pytest.raises(LinkLost):
            engine._blocks.release(sequence)
        assert (sequence.computed, sequence.table.blocks) == (0, [])
        engine.close()


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
                assert all(block.area in WRITABLE and block.codec is Codec.RAW for block in recent)
                seen.append([block.area for block in sequence.table.blocks])
        engine.close()
    assert engine.counters.blocks_private == 0
    assert engine.counters.preemptions == 0
    assert seen[-1][:4] == [Area.HOST] * 4
    assert len(seen[-1]) == 12
