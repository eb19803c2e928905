"""Recovery of folders in which anything may stand, under right checksums too: fields that lie, files of odd names.

It ends within bounded work, raises nothing but what is documented, no wrong byte is served, the tables of the store
hold together, and the tier takes writes again.
"""

from __future__ import annotations

import json
import random
import struct

import pytest
from crc32c import crc32c

from kvstore.core.errors import TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT, Codec, Tier
from kvstore.store.config import StoreConfig
from kvstore.store.embedded import build_store
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.testing.invariants import violations
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tiers.ssd.checkpoint import BLOCK_ROW_BYTES, EXTENT_ROW_BYTES
from kvstore.tiers.ssd.journal import read_frame

MAKER = BlockMaker()
CONFIG = {
    "capacity_bytes": 2 << 20, "read_threads": 1, "write_threads": 1, "commit_interval_s": None,
    "compact_interval_s": None, "io_bytes": 65536, "read_bytes_in_flight": 131072, "write_bytes_in_flight": 131072,
}  # fmt: skip
RUNS = ([1, 2, 3], [10], [20, 21], [30, 31, 32, 33])
BLOCKS = {block.key: bytes(block.stored) for run in RUNS for block in MAKER.chain(run, ROOT_PARENT)}
OPERATIONS_MAX = 5_000
"""Of one start on these folders; some 100 without damage, and some 1,000 when segments are read from end to end."""


def make_image(policy, *, clean):
    """Extents, drops and moves; as after a clean stop, or after a kill with all of it in the journal."""
    disk = FaultyDisk()
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, policy, "fuzz")
    handles = [tier.write(MAKER.namespace_id, MAKER.chain(run, ROOT_PARENT), durable=True) for run in RUNS]
    tier.drop(handles[0][1:2])
    tier.flush()
    tier.compact(0.01)
    after = None if clean else disk.crash(Crash.KILL)
    tier.close()
    return after or disk.crash(Crash.KILL)


IMAGES = [make_image(NamespacePolicy(lossless=codec), clean=clean) for codec in ("", "lz4") for clean in (0, 1)]


def number(chance, size):
    """A number of so many bytes, of those that go wrong."""
    top = 1 << 8 * size
    return chance.choice(
        (0, 1, 2, 3, 5, 7, top - 1, top - 2, top >> 1, (top >> 1) - 1, 0x1000, 0x3000, chance.randrange(top))
    ) % top  # fmt: skip


def put_field(chance, data, at, size):
    data[at : at + size] = number(chance, size).to_bytes(size, "little")


def lie_in_journal(chance, data):
    """Any field of any record, or of a frame, under right checksums."""
    frames, at = [], 512
    generation = int.from_bytes(data[12:16], "little")
    while (frame := read_frame(memoryview(data), at, generation)) is not None:
        frames.append(at)
        at = frame.end
    if not frames:
        return
    at = chance.choice(frames)
    length = int.from_bytes(data[at + 16 : at + 20], "little")
    records, place = [], at + 32
    while place < at + 32 + length:
        records.append(place)
        place += 8 + int.from_bytes(data[place + 4 : place + 8], "little")
    if records:
        record = chance.choice(records)
        body = record + 8
        if data[record] == 1:
            # extent, offset, age, segment, codec, coding, pages or a key; a parent that another block is
            where = [
                (body, 8),
                (body + 8, 8),
                (body + 16, 8),
                (body + 24, 4),
                (body + 28, 1),
                (body + 29, 1),
                (body + 96, 4),
            ]
            if chance.random() < 0.4:
                key = body + chance.choice((64, 96, 128))
                data[key : key + 32] = chance.choice([ROOT_PARENT, *BLOCKS])
            else:
                put_field(chance, data, *chance.choice(where))
        else:
            count = int.from_bytes(data[record + 2 : record + 4], "little")
            size = {2: 10, 3: 20}.get(data[record], 1)
            entry = body + size * chance.randrange(max(count, 1))
            put_field(
                chance,
                data,
                *chance.choice([(entry, 8), (entry + 8, 2)] + [(entry + 10, 8), (entry + 18, 2)] * (size == 20)),
            )
        if chance.random() < 0.2:
            put_field(chance, data, *chance.choice([(record, 1), (record + 2, 2), (record + 4, 4)]))
    if chance.random() < 0.2:
        put_field(chance, data, *chance.choice([(at + 8, 8), (at + 20, 4)]))
    data[at + 24 : at + 28] = struct.pack("<I", crc32c(bytes(data[at + 32 : at + 32 + length])))
    data[at + 28 : at + 32] = struct.pack("<I", crc32c(bytes(data[at : at + 28])))


def lie_in_checkpoint(chance, data):
    """Any number of any column, or of the head, under right checksums."""
    spaces, extents, blocks = struct.unpack_from("<IQQ", data, 28)
    if len(data) < 64 + 32 * spaces + extents * EXTENT_ROW_BYTES + blocks * BLOCK_ROW_BYTES:
        return
    columns, at = [], 64 + 32 * spaces
    counts = [extents] * 8 + [blocks] * 3
    for size, count in zip((8, 8, 8, 4, 2, 2, 1, 32, 4, 2, 32), counts, strict=True):
        columns.append((at, size, count))
        at += size * count
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, size, count = chance.choice(columns)
        if not count:
            continue
        at += size * chance.randrange(count)
        if size == 32:
            data[at : at + 32] = chance.choice([ROOT_PARENT, *BLOCKS])
        else:
            put_field(chance, data, at, size)
    if chance.random() < 0.3:
        put_field(chance, data, *chance.choice([(12, 4), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8), (48, 8)]))
    data[56:60] = struct.pack("<I", crc32c(bytes(data[64:])))
    data[60:64] = struct.pack("<I", crc32c(bytes(data[:60])))


def lie_in_segment(chance, data):
    """A field of an extent's head, or of its tables, under right checksums."""
    heads = [at for at in range(0, len(data), 4096) if data[at : at + 8] == b"KVXTENT1"]
    if not heads:
        return
    at = chance.choice(heads)
    blocks, layers = struct.unpack_from("<II", data, at + 16)
    tables = blocks * (32 + (8 if data[at + 13] else 4) * layers)
    if chance.random() < 0.3 and at + 256 + tables <= len(data):
        put_field(chance, data, at + 256 + chance.randrange(max(tables // 4, 1)) * 4, 4)
        data[at + 248 : at + 252] = struct.pack("<I", crc32c(bytes(data[at + 256 : at + 256 + tables])))
    else:
        sizes = {
            12: 1,
            13: 1,
            16: 4,
            20: 4,
            24: 4,
            28: 4,
            32: 8,
            40: 8,
            48: 8,
            56: 8,
            64: 8,
            72: 4,
            76: 4,
            144: 4,
            148: 1,
        }
        where = chance.choice(list(sizes))
        put_field(chance, data, at + where, sizes[where])
    data[at + 252 : at + 256] = struct.pack("<I", crc32c(bytes(data[at : at + 252])))


ODD = (None, 0, -1, 1, 1 << 70, 1.5, "", "x", "int8", [], [1], {}, {"a": []}, True)


def lie_in_catalog(chance, data):
    """A value of any line, under a right checksum."""
    lines = bytes(data).split(b"\n")
    place = chance.randrange(len(lines))
    try:
        item = json.loads(lines[place][9:])
    except ValueError:
        return
    inside = chance.choice([part for part in (item, item.get("spec"), item.get("policy")) if isinstance(part, dict)])
    name = chance.choice([one for one in inside if one != "catalog"] or ["x"])
    inside[name] = chance.choice(ODD)
    text = json.dumps(item).encode()
    lines[place] = b"%08x %s" % (crc32c(text), text)
    data[:] = b"\n".join(lines)


def noise(chance, data):
    """Bytes that are not what was written, more or less of them."""
    for _ in range(chance.choice((1, 3, 20))):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.2:
        del data[chance.randrange(len(data) + 1) :]
    if chance.random() < 0.1:
        data += chance.randbytes(chance.choice((1, 512, 5000)))


LIES = {"jo": lie_in_journal, "ch": lie_in_checkpoint, "se": lie_in_segment, "na": lie_in_catalog}
NAMES = (
    "segment-\u00b2", "segment-1", "segment-99999999999", "segment-4294967295", "segment-", "segment-00000009",
    "journal-4294967295", "journal-7", "journal-00000000", "journal-\u00b2", "journal-00000009", "journal", "else",
    "checkpoint-4294967295", "checkpoint-99999999999999", "checkpoint-\u0663", "quarantine/\u00b2-x",
    "quarantine/99999999999999999999-x", "quarantine/x",
)  # fmt: skip


def damage(chance, image):
    """A copy of an image with one to four things wrong."""
    disk = image.crash(Crash.KILL)
    for _ in range(chance.choice((1, 1, 2, 4))):
        files = {name: data for name, data in disk.image().items() if name != "LOCK"}
        name = chance.choice(list(files))
        data = bytearray(files[name])
        lie = LIES.get(name[:2], noise)
        kind = chance.random()
        if kind < 0.75:
            lie(chance, data)
        elif kind < 0.9:
            noise(chance, data)
        else:
            # A file under another's name, or an odd one.
            name = chance.choice([*files, *NAMES])
        disk.overwrite(name, bytes(data))
        if kind > 0.97:
            disk.remove(name)
    return disk


def check(seed):
    chance = random.Random(seed)
    disk = damage(chance, chance.choice(IMAGES))
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    config = StoreConfig(loader_threads=0, writer_threads=0, close_flush_ms=0)
    try:
        store = build_store(config, host_bytes=1 << 16, device_bytes=0, disk=tier)
    except TierUnavailable as error:
        tier.close()
        if "version" in error.message:
            return
        raise
    try:
        assert disk.operations < OPERATIONS_MAX
        assert tier.state.state == "ready", tier.state.last_error
        assert violations(store) == []
        assert disk.used_bytes() == tier.usage().ledger_bytes <= CONFIG["capacity_bytes"]
        read_all(tier, store)
        assert violations(store) == []
        tier.put_namespace(MAKER.spec, NamespacePolicy(), "fuzz")
        (handle,) = tier.write(MAKER.namespace_id, MAKER.chain([99], ROOT_PARENT), durable=True)
        tier.compact(0.1)
        into = memoryview(bytearray(len(MAKER.block(99, ROOT_PARENT).stored)))
        assert tier.read([BlockRead(handle, MAKER.key(99), into)]) == [ReadStatus.OK]
        assert tier.state.state == "ready", tier.state.last_error
    finally:
        store.close()
    # What that start left is right for the next one.
    again = SsdTier("memory", SsdConfig(**CONFIG, recovery="strict"), port=disk)
    try:
        assert MAKER.key(99) in {one.key for one in again.recover()}
    finally:
        again.close()


def slices(stored):
    """The bytes that count: what is behind a slice is not kept where slices are coded."""
    nbytes, stride, _ = MAKER.layout.of_codec(Codec.RAW)
    begin, units = MAKER.layout.header_bytes, MAKER.layout.units_of(Codec.RAW)
    return [bytes(stored[begin + unit * stride :][:nbytes]) for unit in range(units)]


def read_all(tier, store):
    table = tier._core.table
    for handle in range(len(table.block_extent)):
        if not table.alive(handle) or table.key(handle) not in BLOCKS:
            continue
        key = table.key(handle)
        into = memoryview(bytearray(len(BLOCKS[key])))
        if tier.read([BlockRead(DiskHandle(handle), key, into)]) == [ReadStatus.OK]:
            assert slices(into) == slices(BLOCKS[key])
    store._movement.look_at(Tier.SSD)
    store.tick()


@pytest.mark.parametrize("part", range(10))
def test_a_start_survives_what_stands_there(part):
    for seed in range(30 * part, 30 * part + 30):
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_journal_that_lies_about_a_key_shows_no_other_block_under_it():
    image = make_image(NamespacePolicy(), clean=False)
    data = bytearray(image.image()["journal-00000001"])
    right, wrong = MAKER.key(21), MAKER.key(77)
    at = data.index(right)
    data[at : at + 32] = wrong
    # The frame that holds it, at a multiple of 512.
    head = data.rindex(b"KVJF", 0, at)
    length = int.from_bytes(data[head + 16 : head + 20], "little")
    data[head + 24 : head + 28] = struct.pack("<I", crc32c(bytes(data[head + 32 : head + 32 + length])))
    data[head + 28 : head + 32] = struct.pack("<I", crc32c(bytes(data[head : head + 28])))
    image.overwrite("journal-00000001", bytes(data))
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=image)
    found = {one.key: one.handle for one in tier.recover()}
    # The first read learns the extent's head, and the second goes by what is known of it.
    for key, expected in ((MAKER.key(20), ReadStatus.OK), (wrong, ReadStatus.CORRUPT)):
        into = memoryview(bytearray(len(BLOCKS[right])))
        assert tier.read([BlockRead(found[key], key, into)]) == [expected]
    tier.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_start_survives_what_stands_there_10000_times():
    for seed in range(1000, 11_000):
        try:
            check(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
