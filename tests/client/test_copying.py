"""Copies by slices and strides, plans of puts and gets, and the checks of a stream's chunks."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.cache import CommitEntry, CommitResult
from kvstore.client import copying
from kvstore.client.copying import Copies, aligned_buffer, as_bytes, copy_all
from kvstore.client.payloads import GetPlan, PutPlan, joined, no_room, slot_bytes
from kvstore.client.standing import Standing
from kvstore.client.streaming import Assembler, parse_chunk, write_messages
from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import Area, NamespaceId, Outcome, Place, Reason
from kvstore.v1 import cache_pb2
from tests.client.harness import blocks_of, chain, payload, small_spec

LAYOUT = BlockLayout.of(small_spec())
NAMESPACE = NamespaceId(bytes(32))


@pytest.fixture(params=["native", "numpy"])
def route(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(copying.native, "available", lambda: False)
    elif not copying.native.available():
        pytest.skip("the C++ kernels were not built")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 9), st.integers(0, 30), st.integers(1, 3))
def test_slices_go_to_their_strides_and_back_and_nowhere_else(route, layers, size, gap, offset, threads):
    stride = size + gap
    memory = np.full(2 * (offset + layers * stride) + 5, 255, np.uint8)
    begins = (offset, 2 * offset + layers * stride)
    reach = (layers - 1) * stride + size
    places = [memory[begin : begin + reach].data for begin in begins]
    payloads = [(np.arange(layers * size, dtype=np.uint8) % 200 + n).data for n in range(2)]
    copy_all([Copies(layers, size, stride, size, places, payloads)], threads)
    expected = np.full_like(memory, 255)
    for begin, source in zip(begins, payloads, strict=True):
        for layer in range(layers):
            expected[begin + layer * stride :][:size] = source[layer * size : (layer + 1) * size]
    assert np.array_equal(memory, expected)
    back = [np.zeros(layers * size, np.uint8).data for _ in range(2)]
    copy_all([Copies(layers, size, size, stride, back, places)], threads)
    assert back == payloads


@pytest.mark.parametrize("threads", [1, 3])
def test_large_copies_are_split_over_threads(route, threads):
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 255, (1 << 20) + 100, np.uint8).data for _ in range(5)]
    targets = [np.zeros((1 << 20) + 100, np.uint8).data for _ in range(5)]
    copy_all([Copies(1, (1 << 20) + 100, (1 << 20) + 100, (1 << 20) + 100, targets, sources)], threads)
    assert targets == sources


def test_buffers_begin_on_a_page():
    buffer = aligned_buffer(10_000)
    assert len(buffer) == 10_000
    assert np.frombuffer(buffer, np.uint8).ctypes.data % mmap.PAGESIZE == 0


@pytest.mark.parametrize("buffer", [b"123", "text", 17, None, np.zeros((4, 4), np.uint8)[:, 1]])
def test_what_is_no_buffer_of_that_size_is_refused(buffer):
    with pytest.raises(InvalidArgument) as caught:
        as_bytes("payloads[2]", buffer, 4)
    assert caught.value.field == "payloads[2]"


def test_any_contiguous_buffer_will_do():
    for buffer in (bytes(8), bytearray(8), memoryview(bytes(8)), np.zeros(4, np.float16), np.zeros((2, 2), np.int16)):
        assert as_bytes("out", buffer, 8).nbytes == 8


def test_rounds_take_half_the_buffer():
    keys, _ = chain(NAMESPACE, 10)
    plan = PutPlan.of(LAYOUT, blocks_of(LAYOUT, keys), part_bytes=2 * LAYOUT.stored_bytes)
    assert [(p.start, p.stop) for p in plan.parts] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert plan.places_max(2 * 4 * LAYOUT.raw_stored_bytes) == 4
    assert plan.places_max(0) == 1, "one block at a time at least"


def test_each_part_commits_its_own_entries():
    keys, tokens = chain(NAMESPACE, 5)
    plan = PutPlan.of(LAYOUT, blocks_of(LAYOUT, keys, token_ids=tokens), part_bytes=2 * LAYOUT.stored_bytes)
    places = [Standing(number, Place(Area.BUFFER, 0, 0)) for number in (11, 13)]
    assert plan.entries(slice(2, 4), places) == [
        CommitEntry(11, keys[2], keys[1]),
        CommitEntry(13, keys[3], keys[2]),
    ]
    assert plan.tokens(slice(3, 4)) == tokens[48:64]


def test_results_of_parts_are_told_in_order():
    first = CommitResult((Outcome.MISS, Outcome.HIT), (Reason.PARENT_MISSING, Reason.NONE), (False, True), (None,) * 2)
    second = no_room(2, None)
    assert (second.outcomes, second.reasons) == ((Outcome.MISS,) * 2, (Reason.NO_SPACE,) * 2)
    both = joined([first, second])
    assert both.outcomes == (Outcome.MISS, Outcome.HIT, Outcome.MISS, Outcome.MISS)
    assert both.existed == (False, True, False, False)
    assert both.busy == second.busy


def sent(count):
    keys, _ = chain(NAMESPACE, count)
    plan = PutPlan.of(LAYOUT, blocks_of(LAYOUT, keys), 64 << 20)
    return keys, [cache_pb2.WriteChunk.FromString(m) for m in write_messages(NAMESPACE, plan, plan.parts[0])]


def answer(chunk, **changes):
    fields = {
        "key_index": chunk.key_index,
        "outcome": int(Outcome.HIT),
        "offset": chunk.offset,
        "data": chunk.data,
        "crc32c": chunk.crc32c,
    }
    return cache_pb2.ReadChunk(**{**fields, **changes})


def assembler(count):
    return Assembler(GetPlan.of(LAYOUT, count, bytearray(count * slot_bytes(LAYOUT))), count)


def test_what_is_sent_is_what_is_gathered():
    keys, chunks = sent(3)
    gathered = assembler(3)
    for chunk in chunks[1:]:
        gathered.take(answer(chunk))
    got = gathered.result()
    assert [bytes(part) for part in got.payloads] == [payload(LAYOUT, key) for key in keys]


def test_a_stream_that_ends_early_is_a_miss_for_what_is_not_whole():
    _, chunks = sent(2)
    gathered = assembler(2)
    gathered.take(answer(chunks[1]))
    gathered.take(answer(chunks[2], data=chunks[2].data[:100], crc32c=crc32c(chunks[2].data[:100])))
    assert gathered.result().outcomes == (Outcome.HIT, Outcome.MISS)
    assert gathered.result().payloads[1] is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"crc32c": 1}, "crc32c"),
        ({"data": b"other"}, "crc32c"),
        ({"offset": 8}, "offset"),
        ({"key_index": 9}, "key_index"),
        ({"data": b""}, "data"),
        ({"data": bytes(slot_bytes(LAYOUT) + 1)}, "data"),
        ({"codec": 7}, "codec"),
        ({"outcome": 99}, "outcome"),
        ({"reason": 99}, "reason"),
        ({"coded": cache_pb2.ChunkCoding(coding=2, plain_bytes=8, planes=2)}, "coded.coding"),
    ],
)
def test_a_damaged_chunk_is_never_placed(changes, field):
    _, chunks = sent(1)
    with pytest.raises(CorruptBlock) as caught:
        assembler(1).take(answer(chunks[1], **changes))
    assert caught.value.field == field


def test_bytes_that_are_no_chunk_are_corrupt():
    with pytest.raises(CorruptBlock) as caught:
        parse_chunk(b"\xff\xff\xff")
    assert caught.value.field == "message"


def test_a_read_only_buffer_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        GetPlan.of(LAYOUT, 1, bytes(slot_bytes(LAYOUT)))
    assert (caught.value.field, caught.value.value) == ("out", "read-only")
