"""When a segment is full: its end is given back, the next one is made, and a dead one is used again."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import FaultyDisk
from kvstore.tiers.base import BlockWrite, DiskHandle
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tiers.ssd.format import SEGMENT_HEAD_BYTES, ExtentShape

MAKER = BlockMaker()
CONFIG = SsdConfig(
    capacity_bytes=1 << 20, read_threads=2, write_threads=2, commit_interval_s=None, compact_interval_s=None,
    io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072, io_deadline_s=30.0,
)  # fmt: skip
SEGMENT = CONFIG.segment_size
SHARE = ExtentShape.of(MAKER.layout, MAKER.block(0, ROOT_PARENT).codec, 1).total_bytes
FITS = (SEGMENT - SEGMENT_HEAD_BYTES) // SHARE
"""Extents of one block in a segment, which leave an end that is too short for another."""


def apart(seeds: Sequence[int]) -> list[BlockWrite]:
    """Blocks of as many chains: each is an extent."""
    return [MAKER.block(seed, ROOT_PARENT) for seed in seeds]


class Case:
    """A tier on a disk in memory."""

    def __init__(self) -> None:
        self.disk = FaultyDisk()
        self.tier = SsdTier("memory", CONFIG, port=self.disk)
        list(self.tier.recover())
        self.tier.put_namespace(MAKER.spec, NamespacePolicy(), "segments")

    def write(self, seeds: Sequence[int], *, durable: bool = False) -> list[DiskHandle]:
        return self.tier.write(MAKER.namespace_id, apart(seeds), durable=durable)

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.disk.image().items() if name.startswith("segment-")}


@pytest.fixture
def case():
    made = Case()
    yield made
    made.tier.close()


def test_the_end_of_a_full_segment_is_given_back_behind_the_writes(case):
    assert SEGMENT - SEGMENT_HEAD_BYTES > FITS * SHARE, "no end to give back"
    case.write(range(FITS + 1))
    # The write that closed it was under way in it: cutting it would have waited for that.
    assert case.sizes() == {"segment-00000001": SEGMENT, "segment-00000002": SEGMENT}
    case.tier.housekeeping()
    assert case.sizes() == {"segment-00000001": SEGMENT_HEAD_BYTES + FITS * SHARE, "segment-00000002": SEGMENT}
    assert case.tier.used_bytes == case.tier.usage().ledger_bytes == case.disk.used_bytes()


def test_the_end_is_given_back_at_once_when_nothing_is_under_way(case):
    for seed in range(FITS + 1):
        case.write([seed])
    assert case.sizes() == {"segment-00000001": SEGMENT_HEAD_BYTES + FITS * SHARE, "segment-00000002": SEGMENT}


def test_ends_are_room_when_the_cap_is_near():
    """As many blocks find room whether ends are given back after each write or only when room is short."""
    assert fill(tidy=False) == fill(tidy=True) > 2 * FITS


def fill(*, tidy: bool) -> int:
    """Write until the tier is full; returns the blocks that found room."""
    case, count = Case(), 0
    try:
        while True:
            case.write([count, count + 1])
            count += 2
            usage = case.tier.usage()
            assert usage.ledger_bytes - usage.metadata_bytes <= case.tier.capacity_bytes
            if tidy:
                case.tier.housekeeping()
    except TierFull:
        return count
    finally:
        case.tier.close()


def test_a_dead_segment_is_used_again_without_a_commit_of_its_own(case):
    handles = case.write(range(2 * FITS), durable=True)
    case.tier.drop(handles[:FITS])
    case.tier.flush()
    before = len(case.disk.log)
    case.write(range(100, 100 + FITS))
    made = case.disk.log[before:]
    assert any(kind == "rename" for _, kind, *_ in map(str.split, made)), made
    assert not any(kind == "fdatasync" for _, kind, *_ in map(str.split, made)), made
    assert case.tier.state.counters["segments_freed"] == 1


def test_a_commit_that_fails_frees_no_segment(case):
    handles = case.write(range(2 * FITS), durable=True)
    case.tier.drop(handles[:FITS])
    case.disk.fail = lambda _number, kind, name: errno.EIO if (kind, name[:7]) == ("fdatasync", "journal") else 0
    with pytest.raises(TierUnavailable):
        case.tier.flush()
    assert case.tier.state.counters.get("segments_freed", 0) == 0
    case.disk.fail = lambda *_: 0
    assert case.tier.probe()
    assert case.tier.state.counters["segments_freed"] == 1


def test_a_dead_segment_whose_drops_are_lost_is_not_used_again(case):
    handles = case.write(range(2 * FITS), durable=True)
    case.tier.drop(handles[:FITS])
    before = len(case.disk.log)
    case.write(range(100, 100 + FITS))
    made = [entry.split()[1] for entry in case.disk.log[before:]]
    assert made.index("fdatasync") < made.index("rename"), made
