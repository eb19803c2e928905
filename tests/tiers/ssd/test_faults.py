"""ENOSPC, EIO, stalls and files removed from outside: misses within a deadline, and back by itself."""

from __future__ import annotations

import errno
import threading

import pytest

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()
CONFIG = {
    "capacity_bytes": 4 << 20, "read_threads": 2, "write_threads": 2, "commit_interval_s": None,
    "compact_interval_s": None, "io_bytes": 65536, "read_bytes_in_flight": 131072, "write_bytes_in_flight": 131072,
    "io_deadline_s": 0.05, "probe_interval_s": 0.001, "header_cache_bytes": 0,
}  # fmt: skip


class Case:
    """A tier on a faulty disk with two durable blocks in it."""

    def __init__(self, **settings) -> None:
        self.disk = FaultyDisk(capacity_bytes=settings.pop("disk_bytes", 1 << 40))
        self.tier = SsdTier("memory", SsdConfig(**(CONFIG | settings)), port=self.disk)
        list(self.tier.recover())
        self.tier.put_namespace(MAKER.spec, NamespacePolicy(), "faults")
        self.blocks = MAKER.chain([1, 2], ROOT_PARENT)
        self.handles = self.tier.write(MAKER.namespace_id, self.blocks, durable=True)

    def read(self) -> list[ReadStatus]:
        into = [memoryview(bytearray(len(block.stored))) for block in self.blocks]
        status = self.tier.read(
            [BlockRead(h, b.key, data) for h, b, data in zip(self.handles, self.blocks, into, strict=True)]
        )
        for outcome, block, data in zip(status, self.blocks, into, strict=True):
            assert outcome is not ReadStatus.OK or bytes(data) == bytes(block.stored)
        return status

    def write(self, seed: int, *, durable: bool = True) -> int:
        return self.tier.write(MAKER.namespace_id, MAKER.chain([seed], ROOT_PARENT), durable=durable)[0]

    def heal(self) -> None:
        self.disk.fail = lambda *_: 0
        self.disk.release()
        assert self.tier.probe(), self.tier.state.last_error
        assert self.tier.state.state == "ready"

    def write_many(self, seeds: range, *, durable: bool = True) -> None:
        for seed in seeds:
            self.write(seed, durable=durable)


@pytest.fixture
def make_case():
    made = []

    def make(**settings) -> Case:
        made.append(Case(**settings))
        return made[-1]

    yield make
    for one in made:
        one.disk.release()
        one.tier.close()


def failing(kind: str, code: int, name: str = ""):
    return lambda _number, what, which: code if what == kind and which.startswith(name) else 0


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        ("pwrite", "segment", errno.EIO),
        ("fdatasync", "segment", errno.EIO),
        ("pwrite", "journal", errno.EIO),
        ("fdatasync", "journal", errno.EIO),
        ("pwrite", "journal", errno.ENOSPC),
        ("pwrite", "segment", errno.EROFS),
    ],
)
def test_a_failing_write_degrades_and_the_probe_brings_the_tier_back(make_case, kind, name, code):
    case = make_case()
    case.disk.fail = failing(kind, code, name)
    with pytest.raises(TierUnavailable):
        case.write(3)
    assert case.tier.state.state == "degraded"
    assert case.tier.state.last_error
    operations = case.disk.operations
    with pytest.raises(TierUnavailable, match="degraded"):
        case.write(4)
    assert case.disk.operations == operations, "a degraded tier does not try"
    assert case.read() == [ReadStatus.OK] * 2, "reads go on"
    case.heal()
    case.write(5)
    assert case.read() == [ReadStatus.OK] * 2


def test_what_was_acknowledged_stays_after_a_failed_journal(make_case):
    case = make_case()
    case.disk.fail = failing("fdatasync", errno.EIO, "journal")
    with pytest.raises(TierUnavailable):
        case.write(3)
    case.heal()
    case.write(4)
    case.tier.close()
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=case.disk)
    found = {one.key for one in tier.recover()}
    tier.close()
    assert {MAKER.key(1), MAKER.key(2), MAKER.key(4)} <= found <= {MAKER.key(seed) for seed in (1, 2, 3, 4)}


def test_a_flush_tells_of_blocks_that_were_lost_meanwhile(make_case):
    case = make_case()
    handle = case.write(3, durable=False)
    case.disk.fail = failing("fdatasync", errno.EIO, "segment")
    with pytest.raises(TierUnavailable):
        case.tier.flush()
    case.heal()
    into = memoryview(bytearray(len(MAKER.block(3, ROOT_PARENT).stored)))
    assert case.tier.read([BlockRead(handle, MAKER.key(3), into)]) == [ReadStatus.GONE]


def test_a_failing_read_is_a_miss_and_several_degrade(make_case):
    case = make_case(read_errors_max=2)
    case.disk.fail = failing("pread", errno.EIO)
    assert case.read() == [ReadStatus.UNAVAILABLE] * 2
    assert case.tier.state.state == "ready"
    assert case.read() == [ReadStatus.UNAVAILABLE] * 2
    assert case.tier.state.state == "degraded"
    case.heal()
    assert case.read() == [ReadStatus.OK] * 2


@pytest.mark.parametrize("header_cache_bytes", [0, 1 << 20], ids=["head", "slices"])
def test_a_stalled_read_is_a_miss_and_its_memory_is_let_go(make_case, header_cache_bytes):
    case = make_case(header_cache_bytes=header_cache_bytes)
    case.disk.stall("pread")
    into = memoryview(bytearray(len(case.blocks[0].stored)))
    assert case.tier.read([BlockRead(case.handles[0], case.blocks[0].key, into)]) == [ReadStatus.UNAVAILABLE]
    assert case.tier.state.state == "degraded"
    assert case.read() == [ReadStatus.UNAVAILABLE] * 2
    into[:] = b"\x5a" * len(into)
    case.heal()
    assert case.read() == [ReadStatus.OK] * 2
    # Closing waits for the late read.
    case.tier.close()
    assert bytes(into) == b"\x5a" * len(into), "a late read wrote into memory that was given back"


def test_a_drop_whose_frame_was_lost_is_durable_once_a_flush_succeeds(make_case):
    case = make_case()
    case.tier.drop(case.handles[1:])
    case.disk.fail = failing("fdatasync", errno.EIO, "journal")
    with pytest.raises(TierUnavailable):
        case.tier.flush()
    case.disk.fail = failing("pwrite", errno.EIO, "checkpoint")
    assert not case.tier.probe()
    case.heal()
    case.tier.flush()
    after = case.disk.crash(Crash.LOST)
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=after)
    found = [one.key for one in tier.recover()]
    tier.close()
    assert found == [MAKER.key(1)]


@pytest.mark.parametrize("kind", ["pwrite", "fdatasync", "create", "fallocate"])
def test_a_stalled_write_is_refused_within_the_deadline(make_case, kind):
    case = make_case()
    case.write_many(range(100, 200), durable=False)
    case.tier.flush()
    case.disk.stall(kind)
    with pytest.raises(TierUnavailable):
        case.write_many(range(200, 300))
    assert case.tier.state.state == "degraded"
    case.heal()
    case.write(7)
    assert case.read() == [ReadStatus.OK] * 2


def test_reads_do_not_wait_behind_writes(make_case):
    case = make_case(io_deadline_s=30.0)
    case.disk.stall("pwrite")
    writers = [threading.Thread(target=case.write, args=(seed,)) for seed in range(10, 20)]
    for writer in writers:
        writer.start()
    assert case.read() == [ReadStatus.OK] * 2
    assert all(writer.is_alive() for writer in writers)
    case.disk.release()
    for writer in writers:
        writer.join()


def test_a_full_filesystem_is_a_full_tier(make_case):
    case = make_case(disk_bytes=1 << 20)
    with pytest.raises(TierFull, match="free on the filesystem"):
        case.write_many(range(10, 1000))
    case.tier.close()
    case = make_case()
    case.disk.fail = failing("fallocate", errno.ENOSPC)
    with pytest.raises(TierFull, match="No space"):
        case.write_many(range(10, 1000))
    assert "No space" in case.tier.state.last_error
    assert case.read() == [ReadStatus.OK] * 2


def test_the_floor_of_free_space_is_kept(make_case):
    case = make_case(disk_bytes=3 << 20, free_floor_bytes=1 << 20, io_deadline_s=30.0)
    with pytest.raises(TierFull, match="kept free"):
        case.write_many(range(10, 1000))
    assert case.disk.free_bytes() >= 1 << 20


def test_the_cap_is_never_exceeded_and_reclaim_makes_room(make_case):
    case = make_case(io_deadline_s=30.0)
    written = {}
    for seed in range(10, 1200):
        while True:
            try:
                written[seed] = case.write(seed, durable=False)
                break
            except TierFull:
                oldest = sorted(written)[:40]
                case.tier.drop([written.pop(one) for one in oldest])
                case.tier.reclaim(1 << 14)
        assert case.disk.used_bytes() <= CONFIG["capacity_bytes"]
    assert len(written) > 100
    usage = case.tier.usage()
    assert usage.ledger_bytes == case.disk.used_bytes()
    assert usage.write_amplification < 3


def test_a_removed_segment_is_a_miss_and_the_tier_goes_on(make_case):
    case = make_case()
    case.disk.remove("segment-00000001")
    case.tier.housekeeping()
    assert case.read() == [ReadStatus.GONE] * 2
    assert case.tier.usage().ledger_bytes == case.disk.used_bytes()
    case.write(3)


def test_a_write_into_a_removed_segment_is_never_acknowledged(make_case):
    case = make_case()
    case.disk.remove("segment-00000001")
    with pytest.raises(TierUnavailable, match="removed from outside"):
        case.write(3)
    case.heal()
    case.write(4)


def test_a_journal_that_is_replaced_while_it_is_looked_at_is_no_failure(make_case, monkeypatch):
    case = make_case()
    committer = case.tier._committer
    fstat = case.disk.fstat

    looked_at = committer.journal

    def replaced(fd):
        monkeypatch.setattr(case.disk, "fstat", fstat)
        committer.write_checkpoint()
        return fstat(fd)

    monkeypatch.setattr(case.disk, "fstat", replaced)
    committer.check_journal()
    assert committer.journal is not looked_at
    assert not committer.journal.broken
    case.write(3)

    def failing(fd):
        raise OSError(errno.EIO, "fstat")

    monkeypatch.setattr(case.disk, "fstat", failing)
    with pytest.raises(OSError, match="fstat"):
        committer.check_journal()


@pytest.mark.parametrize("names", [["journal-00000001"], ["LOCK"], ["namespaces"], "everything"], ids=str)
def test_removed_metadata_is_made_anew(make_case, names):
    case = make_case()
    for name in list(case.disk.image()) if names == "everything" else names:
        case.disk.remove(name)
    written = 0
    for seed in range(3, 6):
        try:
            case.write(seed)
            written += 1
        except TierUnavailable:
            case.heal()
    assert written
    case.tier.housekeeping()
    acknowledged = {MAKER.key(5)} | ({b.key for b in case.blocks} if names != "everything" else set())
    case.tier.close()
    tier = SsdTier("memory", SsdConfig(**CONFIG), port=case.disk)
    found = {one.key for one in tier.recover()}
    tier.close()
    assert acknowledged <= found


def test_concurrent_committers_share_syncs(make_case):
    case = make_case(io_deadline_s=30.0)
    before = case.tier.state.counters["syncs"]
    case.disk.stall("fdatasync")
    committers = [threading.Thread(target=case.write, args=(seed,)) for seed in range(100, 164)]
    for committer in committers:
        committer.start()
    # All but the first group queue up while the first sync stands still.
    while case.tier.state.counters["blocks_written"] < 66:
        threading.Event().wait(0.001)
    case.disk.release()
    for committer in committers:
        committer.join()
    assert case.tier.state.counters["syncs"] - before <= 8
