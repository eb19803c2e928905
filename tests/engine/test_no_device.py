"""A cache without DEVICE: blocks are filled in the engine's pool, kept in HOST, and hit there like any others."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.daemon.config import Config
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.store.store import Store
from tests.client.harness import daemon_thread
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.stores import Sizes, open_cache, open_store, pinned_bytes

GREEDY = SamplingParams(tokens_max=8, ignore_eos=True)
PROMPT = random_prompt(1, 300)
BUFFER = 64 << 20


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


def block_bytes(pair: Pair) -> int:
    geometry = pair.model.spec.geometry
    return pair.model.spec.layers * geometry.raw_bytes


def ask(pair: Pair, store: Store, prompts: list[list[int]], buffer_bytes: int = BUFFER, **config: int) -> Engine:
    """Answer with an engine of its own, which must give the tokens of transformers alone. Returns it, closed."""
    with open_cache(store, buffer_bytes) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=128, **config))
        answers = engine.generate(prompts, GREEDY)
        engine.close()
    if pair.model.spec.codec == "raw":
        assert [answer.tokens for answer in answers] == [pair.greedy(prompt, 8) for prompt in prompts]
    assert set(pinned_bytes(store).values()) == {0}
    return engine


def test_what_one_engine_computed_the_next_reads_in_host(pair: Pair) -> None:
    with open_store(pair.model.spec, Sizes(device=0, host=16)) as store:
        first = ask(pair, store, [PROMPT])
        assert (first.counters.tokens_computed, first.counters.blocks_sealed) == (307, 4)
        second = ask(pair, store, [PROMPT])
        assert second.counters.tokens_from["host"] == 256
        assert (second.counters.tokens_computed, second.counters.blocks_private) == (51, 0)


def test_requests_of_one_engine_share_what_they_compute_at_the_same_time(pair: Pair) -> None:
    prompts = [PROMPT, PROMPT, PROMPT[:200] + random_prompt(2, 100)]
    with open_store(pair.model.spec, Sizes(device=0, host=32)) as store:
        engine = ask(pair, store, prompts)
        assert engine.counters.tokens_from["engine"] + engine.counters.blocks_existed * 64 > 0
        assert ask(pair, store, prompts).counters.tokens_from["host"] >= 256


def test_a_prefix_comes_back_from_ssd(pair: Pair, tmp_path: Path) -> None:
    sizes = Sizes(device=0, host=16, ssd=64)
    with open_store(pair.model.spec, sizes, tmp_path) as store:
        ask(pair, store, [PROMPT])
    with open_store(pair.model.spec, sizes, tmp_path) as store:
        assert ask(pair, store, [PROMPT]).counters.tokens_from["ssd"] == 256


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_buffer_of_few_blocks_takes_them_in_turns(pair: Pair, blocks: int) -> None:
    with open_store(pair.model.spec, Sizes(device=0, host=16)) as store:
        assert ask(pair, store, [PROMPT], blocks * block_bytes(pair)).counters.blocks_sealed == 4
        assert ask(pair, store, [PROMPT]).counters.tokens_from["host"] == 256


def test_a_buffer_smaller_than_a_block_leaves_the_request_in_private_memory(pair: Pair) -> None:
    with open_store(pair.model.spec, Sizes(device=0, host=16)) as store:
        assert ask(pair, store, [PROMPT], 4096).counters.blocks_sealed == 0


def test_host_that_is_full_of_pins_refuses_and_nothing_is_computed_twice(pair: Pair) -> None:
    with open_store(pair.model.spec, Sizes(device=0, host=2)) as store:
        engine = ask(pair, store, [PROMPT])
        assert engine.counters.blocks_sealed == 2
        assert engine.counters.tokens_computed == 307


def test_a_pool_that_is_too_small_preempts(pair: Pair) -> None:
    prompts = [random_prompt(seed, 300) for seed in range(4)]
    with open_store(pair.model.spec, Sizes(device=0, host=64)) as store:
        engine = ask(pair, store, prompts, private_bytes=3 * block_bytes(pair))
        assert engine.counters.preemptions > 0


def test_the_recent_window_stays_raw_until_the_end() -> None:
    pair = build_pair("llama", codec="int8")
    with open_store(pair.model.spec, Sizes(device=0, host=16)) as store:
        engine = ask(pair, store, [PROMPT], recent_raw_tokens=1000)
        assert (engine.counters.tokens_attended_int8, engine.counters.blocks_sealed) == (0, 4)
        again = ask(pair, store, [PROMPT])
        assert again.counters.tokens_from["host"] == 256
        assert again.counters.tokens_attended_int8 > 0


class TestOverADaemon:
    def test_the_cache_is_used(self, pair: Pair) -> None:
        with TemporaryDirectory(prefix="kvn-") as folder:
            config = Config(socket=Path(folder) / "s", device=0, host=4 << 20)
            with daemon_thread(config):
                cached = []
                for _ in range(2):
                    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
                        engine = Engine(pair.model, client)
                        (answer,) = engine.generate([PROMPT], GREEDY)
                        engine.close()
                        assert answer.tokens == pair.greedy(PROMPT, 8)
                        cached.append(answer.cached_tokens)
        assert cached == [{}, {"host": 256}]

    def test_a_session_without_any_memory_is_told_once(self, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
        with TemporaryDirectory(prefix="kvn-") as folder:
            config = Config(socket=Path(folder) / "s", device=0, host=4 << 20)
            bare = ClientOptions(strict=True, buffer_bytes=0)
            with daemon_thread(config), Client(config.socket, bare) as client:
                engine = Engine(pair.model, client, EngineConfig(retry_s=(0.0, 0.0)))
                (answer,) = engine.generate([PROMPT], GREEDY)
                engine.close()
        assert answer.tokens == pair.greedy(PROMPT, 8)
        (told,) = [
            r.getMessage() for r in caplog.records if r.name == "kvstore.engine" and r.levelno >= logging.WARNING
        ]
        assert "everything is computed" in told
        assert "buffer_bytes" in told

    def test_a_gpu_that_was_asked_for_is_refused(self, pair: Pair) -> None:
        refused = pytest.raises(InvalidArgument, match="auto or cpu")
        with open_store(pair.model.spec, Sizes(device=0, host=4)) as store, open_cache(store) as cache, refused:
            Engine(pair.model, cache, EngineConfig(device="cuda"))
