"""Contexts that DEVICE and HOST can not hold: the rest is read from storage layer by layer, and no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client.plan import Plan
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Area, BlockKey, Reason
from kvstore.engine.blocks import BlockState
from kvstore.engine.cold import ColdLost, Indices, Piece
from kvstore.engine.cold_plan import PlanReader
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.sequence import FinishReason
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.stores import Sizes, open_cache, open_store, pinned_bytes

GREEDY = SamplingParams(tokens_max=6, ignore_eos=True)
SMALL = Sizes(device=3, host=6, ssd=200)
NONE_IN_HOST = EngineConfig(token_budget=128, host_share=0.0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


@pytest.mark.parametrize(
    ("family", "plans"), [("llama", True), ("mistral", True), ("gemma2", True), ("smollm3", True), ("gemma2", False)]
)
def test_tokens_are_those_of_transformers_with_nothing_in_host(
    family: str, plans: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, opened = build_pair(family), []
    open_plan = PlanReader._open

    def counted(reader: PlanReader, keys: list[BlockKey]) -> Plan | None:
        opened.append(open_plan(reader, keys) if plans else None)
        return opened[-1]

    monkeypatch.setattr(PlanReader, "_open", counted)
    prompt = random_prompt(1, 1500)
    with open_store(pair.model.spec, SMALL, tmp_path) as store:
        with open_cache(store) as cache:
            engine = Engine(pair.model, cache, NONE_IN_HOST)
            (answer,) = engine.generate([prompt], GREEDY)
            engine.close()
        assert set(pinned_bytes(store).values()) == {0}
    assert answer.tokens == pair.greedy(prompt, 6)
    assert any(plan is not None for plan in opened) is plans
    assert engine.counters.blocks_cooled >= 20
    assert (engine.counters.blocks_private, engine.counters.blocks_demoted) == (0, 0)


def test_device_host_and_storage_together(pair: Pair, tmp_path: Path) -> None:
    prompt = random_prompt(2, 1500)
    with open_store(pair.model.spec, Sizes(device=3, host=12, ssd=200), tmp_path) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=128, host_share=0.5))
        request = engine.add_request(prompt, GREEDY)
        tokens, seen = [], set()
        while engine.has_work:
            tokens += [output.token for output in engine.step()]
            sequence = engine._scheduler.find(request)
            if sequence is not None:
                seen = {(block.area, block.state) for block in sequence.table.blocks}
        engine.close()
    assert tuple(tokens) == pair.greedy(prompt, 6)
    assert {(Area.HOST, BlockState.SEALED), (Area.NONE, BlockState.COLD)} < seen
    assert engine.counters.blocks_private == 0


def test_a_prefix_in_storage_is_read_there(pair: Pair, tmp_path: Path) -> None:
    prompt = random_prompt(3, 1500)
    with open_store(pair.model.spec, SMALL, tmp_path) as store, open_cache(store) as cache:
        first = Engine(pair.model, cache, NONE_IN_HOST)
        first.generate([prompt], GREEDY)
        first.close()
    with open_store(pair.model.spec, SMALL, tmp_path) as store, open_cache(store) as cache:
        second = Engine(pair.model, cache, NONE_IN_HOST)
        (answer,) = second.generate([prompt], GREEDY)
        second.close()
    assert answer.tokens == pair.greedy(prompt, 6)
    assert answer.cached_tokens == {"ssd": 23 * 64}
    assert second.counters.tokens_computed == 1500 - 23 * 64 + 5


def test_int8_from_storage_gives_the_tokens_of_int8_in_host(tmp_path: Path) -> None:
    pair = build_pair("llama", codec="int8")
    prompt, found = random_prompt(4, 1000), []
    for name, sizes, share in (("a", Sizes(device=3, host=40, ssd=200), 0.9), ("b", SMALL, 0.0)):
        with open_store(pair.model.spec, sizes, tmp_path / name) as store, open_cache(store) as cache:
            engine = Engine(pair.model, cache, EngineConfig(token_budget=128, host_share=share))
            found.append(engine.generate([prompt], GREEDY)[0].tokens)
            engine.close()
            assert (engine.counters.blocks_cooled > 0) is (share == 0.0)
    assert found[0] == found[1]


def test_two_requests_and_one_that_streams(pair: Pair, tmp_path: Path) -> None:
    prompts = [random_prompt(5, 1500), random_prompt(6, 100), random_prompt(5, 1400)]
    with open_store(pair.model.spec, Sizes(device=4, host=6, ssd=200), tmp_path) as store:
        with open_cache(store) as cache:
            engine = Engine(pair.model, cache, NONE_IN_HOST)
            answers = engine.generate(prompts, GREEDY)
            engine.close()
        assert set(pinned_bytes(store).values()) == {0}
    assert [answer.tokens for answer in answers] == [pair.greedy(prompt, 6) for prompt in prompts]


def test_a_context_that_outgrows_all_memory_ends_for_want_of_it(pair: Pair) -> None:
    with open_store(pair.model.spec, Sizes(device=3, host=12)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=128, private_bytes=1 << 16))
        (answer,) = engine.generate([random_prompt(7, 800)], SamplingParams(tokens_max=900, ignore_eos=True))
        engine.close()
    assert answer.reason is FinishReason.MEMORY


def test_a_prompt_that_no_tier_has_room_for_is_refused_before_it_starts(pair: Pair, tmp_path: Path) -> None:
    config = replace(NONE_IN_HOST, private_bytes=1 << 16)
    with open_store(pair.model.spec, Sizes(device=3, host=6)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        with pytest.raises(InvalidArgument, match=r"3000 tokens, 47 blocks of .* at most 3 blocks"):
            engine.add_request(random_prompt(7, 3000), GREEDY)
        assert not engine.has_work
        engine.close()
    with open_store(pair.model.spec, SMALL, tmp_path) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        engine.add_request(random_prompt(7, 3000), GREEDY)
        engine.close()


def test_a_block_that_is_lost_is_computed_again(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, lost = random_prompt(8, 1200), []
    read = PlanReader.read

    def fails_once(reader: PlanReader, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        if layer == 1 and not lost and len(reader.starts) > 8:
            lost.append(8)
            raise ColdLost(reader._fetch.keys[8], Reason.QUARANTINED)
        yield from read(reader, layer, chosen)

    monkeypatch.setattr(PlanReader, "read", fails_once)
    with open_store(pair.model.spec, SMALL, tmp_path) as store:
        with open_cache(store) as cache:
            engine = Engine(pair.model, cache, NONE_IN_HOST)
            (answer,) = engine.generate([prompt], GREEDY)
            engine.close()
        assert set(pinned_bytes(store).values()) == {0}
    assert (len(lost), engine.counters.steps_discarded) == (1, 1)
    assert answer.tokens == pair.greedy(prompt, 6)


def test_a_segment_that_is_damaged_under_a_plan_is_never_wrong(pair: Pair, tmp_path: Path) -> None:
    prompt = random_prompt(9, 1500)
    with open_store(pair.model.spec, SMALL, tmp_path) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, NONE_IN_HOST)
        engine.add_request(prompt, GREEDY)
        tokens, damaged = [], False
        while engine.has_work:
            tokens += [output.token for output in engine.step()]
            if not damaged and engine.counters.blocks_cooled >= 12:
                damaged = True
                damage_a_block(tmp_path)
        engine.close()
        assert store.status().counters["corrupt_blocks"] > 0
    assert tuple(tokens) == pair.greedy(prompt, 6)
    assert engine.counters.steps_discarded > 0


def damage_a_block(folder: Path) -> None:
    """Turn over the middle of the segments' written bytes, behind the store's back."""
    segments = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16]
    assert segments
    for path in segments:
        data = bytearray(path.read_bytes())
        written = len(data.rstrip(b"\0"))
        middle = slice(written // 2, written // 2 + 8192)
        data[middle] = bytes(byte ^ 0xFF for byte in data[middle])
        with path.open("r+b") as file:
            file.seek(middle.start)
            file.write(data[middle])
