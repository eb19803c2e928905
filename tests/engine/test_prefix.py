"""Prefixes from every tier: the tokens equal transformers alone, and only what was not there is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.core.types import Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.store.config import StoreConfig
from kvstore.store.store import Store
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.stores import Sizes, clear_tier, open_cache, open_store, pinned_bytes

GREEDY = SamplingParams(tokens_max=8, ignore_eos=True)
PROMPT = random_prompt(1, 300)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


def ask(pair: Pair, store: Store, prompt: list[int]) -> tuple[tuple[int, ...], dict[str, int], int]:
    """Answer with an engine of its own: tokens, where the prefix came from, tokens computed."""
    with open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=128))
        (answer,) = engine.generate([prompt], GREEDY)
        engine.close()
        assert engine.cache_is_up is False
    assert set(pinned_bytes(store).values()) == {0}
    return answer.tokens, answer.cached_tokens, engine.counters.tokens_computed


def demote(store: Store) -> None:
    clear_tier(store, Tier.DEVICE)


def nothing(store: Store) -> None:
    """Leave the blocks where they are."""


@pytest.mark.parametrize(("move", "source"), [(nothing, "device"), (demote, "host")])
def test_a_prefix_is_read_where_it_lies(pair: Pair, move: Callable[[Store], None], source: str) -> None:
    expected = pair.greedy(PROMPT, 8)
    with open_store(pair.model.spec, Sizes(device=16, host=16)) as store:
        assert ask(pair, store, PROMPT) == (expected, {}, 307)
        move(store)
        assert ask(pair, store, PROMPT) == (expected, {source: 256}, 51)
        other = PROMPT[:140] + random_prompt(2, 60)
        assert ask(pair, store, other) == (pair.greedy(other, 8), {source: 128}, 79)


def test_a_prefix_comes_back_from_ssd_after_a_restart(pair: Pair, tmp_path: Path) -> None:
    expected = pair.greedy(PROMPT, 8)
    sizes = Sizes(device=16, host=16, ssd=64)
    with open_store(pair.model.spec, sizes, tmp_path) as store:
        ask(pair, store, PROMPT)
    with open_store(pair.model.spec, sizes, tmp_path) as store:
        assert ask(pair, store, PROMPT) == (expected, {"ssd": 256}, 51)


def test_a_whole_prompt_that_is_resident_still_computes_its_last_token(pair: Pair) -> None:
    prompt = PROMPT[:128]
    with open_store(pair.model.spec, Sizes(device=16, host=16)) as store:
        first = ask(pair, store, prompt)
        assert ask(pair, store, prompt) == (first[0], {"device": 64}, 71)


def test_answers_are_a_prefix_for_the_next_turn(pair: Pair) -> None:
    long = SamplingParams(tokens_max=70, ignore_eos=True)
    with open_store(pair.model.spec, Sizes(device=16, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache)
        (first,) = engine.generate([PROMPT], long)
        turn = [*PROMPT, *first.tokens, *random_prompt(3, 10)]
        (second,) = engine.generate([turn], GREEDY)
        engine.close()
    # 369 tokens of the first turn have K and V: five full blocks.
    assert second.cached_tokens == {"device": 320}
    assert second.tokens == pair.greedy(turn, 8)


def test_a_prefix_that_nobody_waits_for_any_more_is_not_kept_pinned(pair: Pair, tmp_path: Path) -> None:
    sizes = Sizes(device=16, host=16, ssd=64)
    by_hand = StoreConfig(loader_threads=0, writer_threads=0)
    with open_store(pair.model.spec, sizes, tmp_path) as store:
        ask(pair, store, PROMPT)
    with open_store(pair.model.spec, sizes, tmp_path, by_hand) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(wait_ms=1))
        request = engine.add_request(PROMPT, GREEDY)
        assert engine.step() == []
        assert engine.abort(request)
        store.run_pending()
        assert pinned_bytes(store)["HOST"] > 0
        while engine.has_work:
            engine.step()
        engine.step()
        assert set(pinned_bytes(store).values()) == {0}
        engine.close()
