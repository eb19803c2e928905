"""A disk that others have filled: a start finds room for its journal, a write says whose fault it is."""

from __future__ import annotations

import errno

import pytest

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import FaultyDisk
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()
CONFIG = {
    "capacity_bytes": 4 << 20, "segment_bytes": 65536, "read_threads": 1, "write_threads": 1,
    "commit_interval_s": None, "compact_interval_s": None, "io_bytes": 65536,
    "read_bytes_in_flight": 131072, "write_bytes_in_flight": 131072,
}  # fmt: skip


def filled(blocks=60):
    disk = FaultyDisk(capacity_bytes=1 << 40)
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "full")
    chains = [MAKER.chain([seed], ROOT_PARENT) for seed in range(1, blocks + 1)]
    handles = [tier.write(MAKER.namespace_id, chain, durable=True)[0] for chain in chains]
    # No segment is without a live block.
    tier.drop(handles[::4])
    tier.close()
    return disk, blocks - blocks // 4


def no_room_for_a_journal(disk, *, until_unlinked):
    """A new journal finds no room until so many segments were unlinked."""
    there = set(disk.image())

    def fail(_, kind, name):
        gone = sum(" unlink segment-" in line for line in disk.log)
        new = name.startswith("journal") and name not in there
        return errno.ENOSPC if new and kind != "unlink" and gone < until_unlinked else 0

    disk.fail = fail


def test_a_filesystem_smaller_than_the_cap_is_the_size_that_is_told():
    disk = FaultyDisk(capacity_bytes=1 << 20)
    tier = SsdTier("memory", SsdConfig(**CONFIG, free_floor_bytes=262144), port=disk)
    assert tier.state.room_bytes is None
    list(tier.recover())
    assert tier.capacity_bytes > 1 << 20
    assert tier.state.room_bytes == tier.used_bytes + disk.free_bytes() - 262144
    disk.capacity_bytes = 262144
    tier._housekeeper.round()
    assert tier.state.room_bytes == tier.used_bytes
    tier.close()


def test_a_start_on_a_full_disk_gives_up_the_emptiest_segment():
    disk, live = filled()
    segments = sum(one.startswith("segment-") for one in disk.image())
    assert segments > 3
    no_room_for_a_journal(disk, until_unlinked=1)
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    found = list(tier.recover())
    assert 0 < live - len(found) <= live // segments + 2, "one segment, and that with the least in it"
    assert tier.state.counters["segments_given_up"] == 1
    assert tier.report.quarantined == live - len(found)
    disk.fail = lambda *_: 0
    tier.close()
    again = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    assert len(list(again.recover())) == len(found)
    again.close()


def test_strict_mode_gives_nothing_up():
    disk, _ = filled()
    no_room_for_a_journal(disk, until_unlinked=1)
    before = {name for name in disk.image() if name.startswith("segment-")}
    tier = SsdTier("memory", SsdConfig(**CONFIG, recovery="strict"), port=disk)
    with pytest.raises(TierUnavailable):
        list(tier.recover())
    assert {name for name in disk.image() if name.startswith("segment-")} == before
    tier.close()


@pytest.mark.parametrize(("free", "others"), [(0, True), (10 << 20, False)])
def test_a_full_disk_says_whether_others_filled_it(monkeypatch, free, others):
    disk = FaultyDisk(capacity_bytes=1 << 40)
    tier = SsdTier("memory", SsdConfig(**CONFIG, free_floor_bytes=10 << 20), port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "full")
    monkeypatch.setattr(disk, "free_bytes", lambda: free)
    with pytest.raises(TierFull) as caught:
        tier.write(MAKER.namespace_id, MAKER.chain([1], ROOT_PARENT), durable=True)
    assert caught.value.others is others
    assert "kept free" in tier.state.last_error
    tier.close()
