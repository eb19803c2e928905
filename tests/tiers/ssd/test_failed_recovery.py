"""A recovery that the disk fails ends no start: the tier is degraded and says why, and the next start finds all."""

from __future__ import annotations

import errno

import pytest

from kvstore.core.errors import TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()
CONFIG = {
    "capacity_bytes": 4 << 20, "segment_bytes": 65536, "read_threads": 1, "write_threads": 1, "io_deadline_s": 0.2,
    "commit_interval_s": None, "compact_interval_s": None, "io_bytes": 65536,
    "read_bytes_in_flight": 131072, "write_bytes_in_flight": 131072,
}  # fmt: skip
CHAINS = [MAKER.chain([seed, seed + 1000], ROOT_PARENT) for seed in range(20)]


def filled():
    """As after a kill: a checkpoint, a journal, and an end of a segment to be cut."""
    disk = FaultyDisk()
    for part in (CHAINS[:10], CHAINS[10:]):
        tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
        list(tier.recover())
        tier.put_namespace(MAKER.spec, NamespacePolicy(), "failed")
        for chain in part:
            tier.write(MAKER.namespace_id, chain, durable=True)
        after = disk.crash(Crash.KILL)
        tier.close()
    return after


def calls_of_a_recovery():
    disk = filled()
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    begin = len(disk.log)
    list(tier.recover())
    kinds = sorted({line.split()[1] for line in disk.log[begin:]} - {"statvfs"})
    tier.close()
    return begin, len(disk.log), kinds


BEGIN, END, KINDS = calls_of_a_recovery()


def is_degraded(tier, what):
    assert tier.state.state == "degraded"
    assert what in tier.state.last_error
    assert tier.report.blocks == 0
    with pytest.raises(TierUnavailable, match="recovery"):
        tier.write(MAKER.namespace_id, CHAINS[0], durable=True)
    with pytest.raises(TierUnavailable):
        tier.put_namespace(MAKER.spec, NamespacePolicy(), "failed")
    with pytest.raises(TierUnavailable):
        tier.flush()
    with pytest.raises(TierUnavailable):
        tier.reclaim(1)
    block = CHAINS[0][0]
    into = memoryview(bytearray(len(block.stored)))
    assert tier.read([BlockRead(DiskHandle(0), block.key, into)]) != [ReadStatus.OK]
    assert not tier.probe()
    assert tier.used_bytes == 0
    tier.drop([DiskHandle(0)])
    tier.touch([DiskHandle(0)])
    assert tier.namespaces() == []
    tier.close()


def finds_all(disk):
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    assert len(list(tier.recover())) == 2 * len(CHAINS)
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "failed")
    tier.write(MAKER.namespace_id, MAKER.chain([5000], ROOT_PARENT), durable=True)
    tier.close()


@pytest.mark.parametrize("number", range(BEGIN + 1, END + 1, 2))
def test_an_error_of_the_disk_in_recovery_ends_no_start(number):
    disk = filled()
    # From this call on, as a device that has gone.
    disk.fail = lambda now, *_: errno.EIO if now >= number else 0
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    found = list(tier.recover())
    if tier.state.state == "ready":
        # What the tier can do without.
        assert len(found) == 2 * len(CHAINS)
    else:
        assert not found
        is_degraded(tier, "Input/output error")
    tier.close()
    disk.fail = lambda *_: 0
    finds_all(disk.crash(Crash.KILL))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stall_in_recovery_ends_no_start(kind):
    disk = filled()
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=disk)
    disk.stall(kind)
    try:
        assert list(tier.recover()) == []
        is_degraded(tier, "no answer from the device")
    finally:
        disk.release()
    finds_all(disk.crash(Crash.KILL))


def test_strict_mode_ends_the_start():
    disk = filled()
    tier = SsdTier("memory", SsdConfig(**CONFIG, recovery="strict"), port=disk)
    disk.fail = lambda _number, kind, _name: errno.EIO if kind == "pread" else 0
    with pytest.raises(TierUnavailable, match="Input/output error"):
        list(tier.recover())
    tier.close()
