"""Damage at every field of a small image: always a miss and a counter, never bytes, never a crash."""

from __future__ import annotations

import pytest

from kvstore.core.errors import TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()
CONFIG = {
    "capacity_bytes": 1 << 20, "read_threads": 1, "write_threads": 1, "commit_interval_s": None,
    "compact_interval_s": None, "io_bytes": 65536, "read_bytes_in_flight": 131072, "write_bytes_in_flight": 131072,
}  # fmt: skip
RUNS = (range(2), range(10, 11), range(20, 22))
BLOCKS = {block.key: bytes(block.stored) for run in RUNS for block in MAKER.chain(list(run), ROOT_PARENT)}


def open_tier(disk: FaultyDisk, **settings) -> SsdTier:
    return SsdTier("memory", SsdConfig(**(CONFIG | settings)), port=disk)


def make_image(*, clean: bool) -> FaultyDisk:
    """Three extents, five blocks; as after a clean stop (a checkpoint), or after a kill (a journal)."""
    disk = FaultyDisk()
    tier = open_tier(disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "damage")
    for run in RUNS:
        tier.write(MAKER.namespace_id, MAKER.chain(list(run), ROOT_PARENT), durable=True)
    after = None if clean else disk.crash(Crash.KILL)
    tier.close()
    return after or disk.crash(Crash.KILL)


IMAGES = {"checkpoint": make_image(clean=True), "journal": make_image(clean=False)}


def reopen(image: FaultyDisk, name: str, data: bytes, **settings) -> tuple[int, int]:
    """Open a damaged image; returns (blocks that came back right, misses), and fails on anything wrong."""
    disk = image.crash(Crash.KILL)
    disk.overwrite(name, data)
    tier = open_tier(disk, **settings)
    try:
        found = list(tier.recover())
        right = 0
        for one in found:
            into = memoryview(bytearray(len(BLOCKS[one.key])))
            (status,) = tier.read([BlockRead(one.handle, one.key, into)])
            assert status in (ReadStatus.OK, ReadStatus.CORRUPT)
            if status is ReadStatus.OK:
                assert bytes(into) == BLOCKS[one.key]
                right += 1
        counted = tier.report.quarantined + tier.state.counters.get("corrupt", 0) + bool(tier.report.cut_bytes)
        if right < len(BLOCKS):
            assert counted, f"{name}: {len(BLOCKS) - right} blocks are missing and nothing is counted"
        assert tier.usage().ledger_bytes == disk.used_bytes()
        # The tier works on.
        tier.put_namespace(MAKER.spec, NamespacePolicy(), "damage")
        tier.write(MAKER.namespace_id, MAKER.chain([99], ROOT_PARENT), durable=True)
        return right, len(BLOCKS) - right
    finally:
        tier.close()


def places(data: bytes, name: str, step: int) -> list[int]:
    """Every ``step``-th byte of the heads and records, from the first on; every 512th of the rest."""
    begins = [0]
    if name.startswith("segment"):
        begins = [at for at in range(0, len(data), 4096) if data[at : at + 8] in (b"KVXTENT1", b"KVSEGMT1")]
    found = {place for at in begins for place in range(at, min(len(data), at + 400), step)}
    return sorted(found | set(range(0, len(data), 512)))


def cases(image: FaultyDisk) -> list[str]:
    return [name for name in image.image() if name != "LOCK"]


def flip_bits(image: FaultyDisk, step: int) -> int:
    misses = 0
    for name in cases(image):
        data = image.image()[name]
        for at in places(data, name, step):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            misses += reopen(image, name, bytes(flipped))[1]
    return misses


@pytest.mark.parametrize("kind", IMAGES)
def test_a_flipped_bit_is_a_miss(kind):
    # Every field of four bytes and more is hit; each narrower one in the slow test.
    assert flip_bits(IMAGES[kind], 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", IMAGES)
def test_a_flipped_bit_of_any_byte_is_a_miss(kind):
    assert flip_bits(IMAGES[kind], 1)


@pytest.mark.parametrize("kind", IMAGES)
def test_a_truncated_file_is_a_miss(kind):
    image = IMAGES[kind]
    for name in cases(image):
        data = image.image()[name]
        for size in sorted({0, 1, 11, 63, 511, 512, 513, 600, *range(4096, len(data), 4096)}):
            if size < len(data):
                reopen(image, name, data[:size])


@pytest.mark.parametrize("kind", IMAGES)
def test_a_zeroed_page_is_a_miss(kind):
    image = IMAGES[kind]
    for name in cases(image):
        data = image.image()[name]
        for at in range(0, len(data), 4096):
            reopen(image, name, data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :])


def extents(data: bytes) -> list[int]:
    return [at for at in range(0, len(data), 4096) if data[at : at + 8] == b"KVXTENT1"]


@pytest.mark.parametrize("kind", IMAGES)
def test_swapped_records_are_misses(kind):
    image = IMAGES[kind]
    data = image.image()["segment-00000001"]
    first, second, third = extents(data)
    # The first and the third extent are of one shape.
    size = second - first
    swapped = bytearray(data)
    swapped[first : first + size], swapped[third : third + size] = (
        data[third : third + size],
        data[first : first + size],
    )
    assert reopen(image, "segment-00000001", bytes(swapped)) == (1, 4)
    # The slices alone: each is whole, and another's.
    swapped = bytearray(data)
    a, b = slice(first + 4096, first + size), slice(third + 4096, third + size)
    swapped[a], swapped[b] = data[b], data[a]
    assert reopen(image, "segment-00000001", bytes(swapped)) == (1, 4)


def test_a_lost_checkpoint_is_salvaged_from_the_segments():
    image = IMAGES["checkpoint"]
    for name in cases(image):
        if name.startswith("checkpoint"):
            assert reopen(image, name, b"") == (len(BLOCKS), 0)


@pytest.mark.parametrize("kind", IMAGES)
def test_a_missing_segment_is_a_miss(kind):
    disk = IMAGES[kind].crash(Crash.KILL)
    disk.remove("segment-00000001")
    tier = open_tier(disk)
    assert list(tier.recover()) == []
    assert tier.report.quarantined == len(BLOCKS)
    tier.close()


def test_strict_mode_refuses_what_no_crash_explains():
    image = IMAGES["checkpoint"]
    name = next(name for name in cases(image) if name.startswith("checkpoint"))
    with pytest.raises(TierUnavailable, match="strict"):
        reopen(image, name, image.image()[name][:-1], recovery="strict")
    assert reopen(image, name, image.image()[name], recovery="strict") == (len(BLOCKS), 0)


@pytest.mark.parametrize(("kind", "prefix"), [("checkpoint", "checkpoint-"), ("journal", "journal-")])
def test_the_parent_of_a_block_is_known_when_its_neighbour_is_dead(kind, prefix):
    disk = IMAGES[kind].crash(Crash.KILL)
    tier = open_tier(disk)
    handles = {one.key: one.handle for one in tier.recover()}
    tier.drop([handles[MAKER.key(0)]])
    tier.close()
    tier = open_tier(disk)
    assert {one.key: one.parent for one in tier.recover()}[MAKER.key(1)] == MAKER.key(0)
    tier.close()
    assert any(name.startswith(prefix) for name in disk.image())
