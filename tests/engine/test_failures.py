"""The cache ends at any call, or for a while, or for ever: the tokens are right all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.types import LeaseId, Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.store.session import Session
from kvstore.store.store import Store
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.flaky import FlakyCache
from tests.engine.stores import Sizes, clear_tier, open_cache, open_store, pinned_bytes

GREEDY = SamplingParams(tokens_max=6, ignore_eos=True)
STEM = random_prompt(1, 150)
PROMPTS = [[*STEM, *random_prompt(2, 55)], random_prompt(3, 61), [*STEM[:128], *random_prompt(4, 3)]]
SIZES = Sizes(device=5, host=12, ssd=64)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama", block_tokens=32)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[int, ...]]:
    return [pair.greedy(prompt, 6) for prompt in PROMPTS]


@pytest.fixture
def store(pair: Pair, tmp_path: Path) -> Iterator[Store]:
    with open_store(pair.model.spec, SIZES, tmp_path) as found:
        yield found


def make_engine(pair: Pair, cache: object, clock: ManualClock | None = None, **settings: object) -> Engine:
    config = EngineConfig(token_budget=48, private_bytes=1 << 24, retry_s=(0.0, 0.0), wait_ms=5, **settings)
    return Engine(pair.model, cache, config, clock)


def salted(pair: Pair, number: int) -> Pair:
    """The same model as another tenant: it finds nothing that others stored."""
    spec = replace(pair.model.spec, salt=number.to_bytes(4, "big"))
    return replace(pair, model=replace(pair.model, spec=spec))


WINDOW = {"codec": "int8", "device_codec": "int8", "raw_layers": (0, 1, 2), "recent_raw_tokens": 64}
"""Blocks are committed late, when they leave the window or their request ends. All layers raw: the tokens are exact."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "stride", "settings"),
    [("lost-before", 1, {}), ("lost-after", 2, {}), ("silent", 2, {}), ("lost-before", 3, WINDOW)],
)
def test_any_call_may_be_the_last_of_its_session(
    pair: Pair, expected: list[tuple[int, ...]], store: Store, mode: str, stride: int, settings: dict[str, object]
) -> None:
    fail_at = 0
    while True:
        fail_at += stride
        cache = FlakyCache(store, fail_at, mode=mode)
        engine = make_engine(salted(pair, fail_at), cache, **settings)
        answers = engine.generate(PROMPTS, GREEDY)
        failed = cache.failed
        again = engine.generate(PROMPTS[:1], GREEDY)
        assert [a.tokens for a in answers] == expected, f"call {fail_at} failed"
        assert again[0].tokens == expected[0], f"call {fail_at} failed"
        if failed:
            assert engine.cache_is_up, f"not back after call {fail_at} failed"
            assert again[0].cached_tokens, f"no hit after call {fail_at} failed"
        engine.close()
        cache.close()
        assert set(pinned_bytes(store).values()) == {0}, f"call {fail_at} failed"
        if not cache.failed:
            break
    assert fail_at > 30


def test_a_cache_that_stays_away_is_done_without(pair: Pair, expected: list[tuple[int, ...]], store: Store) -> None:
    for fail_at in (3, 17, 29):
        cache = FlakyCache(store, fail_at, away=1 << 30)
        engine = make_engine(pair, cache)
        assert [a.tokens for a in engine.generate(PROMPTS, GREEDY)] == expected
        assert not engine.cache_is_up
        engine.close()


def test_a_cache_that_was_never_there(pair: Pair, expected: list[tuple[int, ...]], store: Store) -> None:
    cache = FlakyCache(store, 1, away=40)
    engine = make_engine(pair, cache)
    assert not engine.cache_is_up
    assert [a.tokens for a in engine.generate(PROMPTS, GREEDY)] == expected
    assert engine.counters.blocks_private > 0
    while not engine.cache_is_up:
        engine.generate(PROMPTS[1:2], GREEDY)
    (cold,) = engine.generate(PROMPTS[:1], GREEDY)
    (warm,) = engine.generate(PROMPTS[:1], GREEDY)
    assert (cold.tokens, warm.tokens) == (expected[0], expected[0])
    assert sum(warm.cached_tokens.values()) == 192
    engine.close()


def test_results_computed_under_an_expired_lease_are_thrown_away(
    pair: Pair, expected: list[tuple[int, ...]], store: Store
) -> None:
    clock = ManualClock()
    with open_cache(store) as cache:
        engine = make_engine(pair, cache, clock, lease_ttl_ms=30_000)
        ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        stopped = False
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token or 0)
            if not stopped and any(tokens.values()):
                # As if the process had been stopped for a minute: the leases ran out and others took the memory.
                stopped = True
                end_leases(store, cache)
                clock.advance(60.0)
        engine.close()
    assert [tuple(tokens[i]) for i in ids] == expected
    assert engine.counters.links_lost == 1
    assert engine.counters.steps_discarded == 1


def end_leases(store: Store, cache: Session) -> None:
    for lease in store.leases():
        cache.release(LeaseId(lease.lease_id))
    for tier in (Tier.DEVICE, Tier.HOST):
        clear_tier(store, tier)


def test_leases_are_renewed_while_requests_run(pair: Pair, store: Store) -> None:
    clock = ManualClock()
    with open_cache(store) as cache:
        engine = make_engine(pair, cache, clock, lease_ttl_ms=30_000)
        engine.add_request(PROMPTS[0], GREEDY)
        while engine.has_work:
            engine.step()
            clock.advance(9.0)
        assert engine.counters.links_lost == 0
        engine.close()
