"""The native engine of reading plans by itself: files of bytes, columns made by hand, and rings that tests read."""

from __future__ import annotations

import mmap
import os
import random
import struct

import lz4.block
import numpy as np
import pytest
from crc32c import crc32c

from kvstore.kernels import native
from kvstore.kernels.plan_engine import (
    CONTROL_BYTES,
    NO_BLOCK,
    Columns,
    EventKind,
    Kind,
    PlanEnded,
    PlanEngine,
    PlanFull,
    decode,
    give_back,
    wait_landed,
)
from kvstore.tiers.lossless import decode_slice, encode_slice

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the C++ extension")


class Reader:
    """One plan with a ring of its own, read to its end."""

    def __init__(self, engine, slot_bytes, kinds, *, owner=1, slots=3):
        self.engine, self.slots, self.slot_bytes = engine, slots, slot_bytes
        self.ring = memoryview(mmap.mmap(-1, CONTROL_BYTES + slots * slot_bytes))
        self.number = engine.open(owner, self.ring, slots, slot_bytes, kinds)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        engine.add_bell(self.bell)
        self.taken = 0

    def set(self, file, rows, unit_bytes, planes=None, version=None):
        """Blocks of (offset, length, crc) by unit."""
        first = self.engine.add_blocks(self.number, len(rows))
        table = np.array(rows, np.uint64).reshape(len(rows), -1, 3)
        self.version = np.zeros(1, np.uint64) if version is None else version
        self.place(range(first, first + len(rows)), file, table, planes)

    def place(self, blocks, file, table, planes=None):
        count = len(blocks)
        self.engine.set_blocks(
            self.number,
            Columns(
                np.array(blocks, np.uint32), 0, [(file, self.version, int(self.version[0]))], np.zeros(count, np.int32),
                np.zeros(count, np.uint8) if planes is None else np.array(planes, np.uint8),
                np.ascontiguousarray(table[:, :, 0]), *(table[:, :, n].astype(np.uint32) for n in (1, 2)),
            ),
        )  # fmt: skip

    def pieces(self, count):
        """The next pieces: (layer, first, count) and bytes; what ended it instead."""
        for _ in range(count):
            seen = wait_landed(self.ring, self.taken + 1, 20)
            if (seen.landed - self.taken) & 0xFFFFFFFF == 0:
                yield seen
                return
            at = 64 + 64 * (self.taken % self.slots)
            _, _, layer, first, blocks, slice_bytes, _ = struct.unpack_from("<7I", self.ring, at)
            begin = CONTROL_BYTES + (self.taken % self.slots) * self.slot_bytes
            yield (layer, first, blocks), bytes(self.ring[begin : begin + blocks * slice_bytes])
            self.taken += 1
            give_back(self.ring, self.taken, self.bell)

    def close(self):
        self.engine.close(self.number)
        self.engine.remove_bell(self.bell)
        os.close(self.bell)


@pytest.fixture
def engine():
    made = PlanEngine(2, 2 << 20)
    yield made
    made.stop(5)


@pytest.fixture
def file_of(tmp_path):
    opened = []

    def make(data):
        path = tmp_path / f"file-{len(opened)}"
        path.write_bytes(data + bytes(-len(data) % 4096))
        opened.append(os.open(path, os.O_RDWR))
        return opened[-1]

    yield make
    for fd in opened:
        os.close(fd)


def units(data, places):
    return [[(at, size, crc32c(data[at : at + size]))] for at, size in places]


def test_units_larger_than_a_read_lie_across_its_steps(engine, file_of):
    draw = random.Random(1)
    size = (5 << 20) + 777
    data = draw.randbytes(2 * size + 9000)
    file = file_of(data)
    reader = Reader(engine, 6 << 20, [Kind([0, 1], [size - 100], [0], size, size)])
    reader.set(file, units(data, [(123, size), (size + 4567, size)]), size)
    assert engine.begin(reader.number, (0, 1))[1] == 2
    # A slice may end before its unit, whose checksum covers the rest.
    assert [got for _, got in reader.pieces(2)] == [data[123:][: size - 100], data[size + 4567 :][: size - 100]]
    reader.close()


def test_slices_of_several_units_are_joined(engine, file_of):
    data = random.Random(2).randbytes(1 << 18)
    file = file_of(data)
    # Layer 0 has one unit, layer 1 three of which the last counts by 100 bytes.
    reader = Reader(engine, 1 << 16, [Kind([0, 1, 4], [512, 2 * 512 + 100], [1, 0], 512, 512)])
    rows = [[(b * 8192 + u * 512, 512, crc32c(data[b * 8192 + u * 512 :][:512])) for u in range(4)] for b in range(5)]
    reader.set(file, rows, 512)
    _, pieces = engine.begin(reader.number, (0, 2))
    got = list(reader.pieces(pieces))
    assert got[0] == ((0, 0, 5), b"".join(data[b * 8192 :][:512] for b in range(5)))
    assert got[1] == ((1, 0, 5), b"".join(data[b * 8192 + 512 :][:1124] for b in range(5)))
    reader.close()


@pytest.mark.parametrize("planes", [1, 2, 4])
def test_coded_units_are_decoded_where_they_are_shorter(engine, file_of, planes):
    draw = random.Random(planes)
    size = 4096
    plain = [bytes(draw.choices(b"abcd", k=size)), draw.randbytes(size), bytes(size)]
    coded = [bytes(encode_slice(memoryview(one), planes)) for one in plain]
    assert len(coded[1]) == size > len(coded[0])
    data = b"".join(coded)
    starts = np.cumsum([0, *map(len, coded)])[:-1].tolist()
    reader = Reader(engine, 1 << 16, [Kind([0, 1], [size], [0], size, size)])
    rows = [[(at, len(one), crc32c(whole))] for at, one, whole in zip(starts, coded, plain, strict=True)]
    reader.set(file_of(data), rows, size, planes=[planes] * 3)
    engine.begin(reader.number, (0, 1))
    assert [got for _, got in reader.pieces(1)] == [b"".join(plain)]
    reader.close()


def test_decoding_agrees_with_the_library_on_whatever_bytes():
    """Damaged slices give what the library gives, or nothing; never more than was asked for."""
    draw = random.Random(5)
    for turn in range(3000):
        planes = draw.choice([1, 2, 4])
        size = planes * draw.randint(1, 700)
        plain = bytes(draw.choices(bytes(range(draw.choice([2, 5, 256]))), k=size))
        split = np.frombuffer(plain, np.uint8).reshape(-1, planes).T.tobytes()
        coded = bytearray(lz4.block.compress(split, store_size=False))
        for _ in range(draw.randint(0, 3) if turn % 3 else 0):
            coded[draw.randrange(len(coded))] = draw.randrange(256)
        if turn % 5 == 4:
            del coded[draw.randrange(len(coded)) :]
        into = bytearray(size)
        try:
            decode_slice(memoryview(bytes(coded)), planes, memoryview(into))
            expected = bytes(into)
        except Exception:  # noqa: BLE001  the library's word for what is no slice
            expected = None
        found = decode(bytes(coded), size, planes)
        assert found == expected or (expected is None and found is not None and len(found) == size)
        if turn % 3 == 0 and turn % 5 != 4:
            assert found == plain


def test_a_wrong_checksum_and_a_short_file_are_troubles_and_a_second_try_may_do(engine, file_of):
    data = bytearray(random.Random(3).randbytes(1 << 16))
    file = file_of(bytes(data))
    reader = Reader(engine, 1 << 16, [Kind([0, 1], [1000], [0], 1000, 1000)])
    rows = units(data, [(n * 1000, 1000) for n in range(20)])
    rows[7][0] = (7000, 1000, 1)
    reader.set(file, rows, 1000)
    engine.begin(reader.number, (0, 1))
    (event,) = engine.events(20)
    assert (event.plan, event.kind, event.block, event.stale) == (reader.number, EventKind.TROUBLE, 7, False)
    assert wait_landed(reader.ring, 1, 0.0).landed == 0
    right = np.array([[[7000, 1000, crc32c(data[7000:8000])]]], np.uint64)
    reader.place([7], file, right)
    engine.retry(reader.number)
    ((_, got),) = reader.pieces(1)
    assert got == bytes(data[:20000])
    # Behind the end of the file there is nothing.
    reader.place([3], file, np.array([[[1 << 20, 1000, 0]]], np.uint64))
    engine.begin(reader.number, (0, 1))
    (event,) = engine.events(20)
    assert event.kind is EventKind.TROUBLE
    engine.fail(reader.number, 4, 3)
    (seen,) = list(reader.pieces(1))
    assert (seen.ended, seen.reason, seen.block) == (1, 4, 3)
    with pytest.raises(PlanEnded):
        engine.begin(reader.number, (0, 1))
    reader.close()


def test_a_file_of_another_version_is_not_believed(engine, file_of):
    data = random.Random(4).randbytes(1 << 16)
    old, new = file_of(bytes(1 << 16)), file_of(data)
    reader = Reader(engine, 1 << 16, [Kind([0, 1], [512], [0], 512, 512)])
    rows = units(data, [(n * 512, 512) for n in range(10)])
    reader.set(old, rows, 512)
    reader.version[0] += 1
    engine.begin(reader.number, (0, 1))
    (event,) = engine.events(20)
    assert event.stale
    assert engine.stale_blocks(reader.number) == list(range(10))
    reader.version = np.zeros(1, np.uint64)
    reader.place(range(10), new, np.array(rows, np.uint64).reshape(10, 1, 3))
    engine.retry(reader.number)
    ((_, got),) = reader.pieces(1)
    assert got == data[: 10 * 512]
    assert engine.stale_blocks(reader.number) == []
    reader.close()


def test_two_owners_get_as_many_bytes_though_one_has_more_plans(engine, file_of):
    data = random.Random(6).randbytes(4 << 20)
    file = file_of(data)
    rows = units(data, [(n * 4096, 4096) for n in range(1024)])
    kind = Kind([0, 1], [4096], [0], 4096, 4096)
    readers = [Reader(engine, 1 << 16, [kind], owner=owner, slots=8) for owner in (1, 1, 1, 2)]
    for reader in readers:
        reader.set(file, rows, 4096)
        engine.begin(reader.number, (0, 1))
    # What is asked for while all have credits: each owner's share by the order in which pieces land.
    for _ in range(3):
        for reader in readers:
            list(reader.pieces(2))
    done = [reader.taken for reader in readers]
    assert done == [6, 6, 6, 6]
    for reader in readers:
        assert b"".join(got for _, got in reader.pieces(58)) == data[6 * 65536 :]
        reader.close()


def test_too_much_queued_is_refused_and_a_drop_makes_room(engine, file_of):
    data = bytes(8192)
    reader = Reader(engine, 4096, [Kind([0, 1], [4096], [0], 4096, 4096)], slots=1)
    reader.set(file_of(data), units(data, [(0, 4096), (4096, 4096)]), 4096)
    begun = [engine.begin(reader.number, (0, 1))[0] for _ in range(64)]
    assert begun == list(range(1, 65))
    # One of them may be under way by now.
    with pytest.raises(PlanFull):
        _ = [engine.begin(reader.number, (0, 1)) for _ in range(3)]
    engine.drop(reader.number)
    engine.begin(reader.number, (0, 1), [1] * 1000)
    with pytest.raises(PlanFull):
        engine.begin(reader.number, (0, 1), [0] * (1 << 20))
    with pytest.raises(ValueError, match="slot"):
        engine.open(1, reader.ring, 1, 4096, [Kind([0, 1], [4097], [0], 4097, 4097)])
    assert wait_landed(reader.ring, 0, 0.0).block == NO_BLOCK
    reader.close()
