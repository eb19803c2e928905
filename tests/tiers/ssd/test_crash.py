"""Power cuts after every single mutation of a script, and every single call failing: nothing wrong, nothing lost."""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import dataclass, field

import pytest

from kvstore.core.errors import KVStoreError
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT, BlockKey
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()
CONFIG = SsdConfig(
    capacity_bytes=1 << 20, read_threads=2, write_threads=1, commit_interval_s=None, compact_interval_s=None,
    io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072, journal_bytes=8192,
)  # fmt: skip


@dataclass
class Ledger:
    """What the script did: every block it ever wrote, those acknowledged as durable, those whose drop is durable."""

    blocks: dict[BlockKey, bytes] = field(default_factory=dict)
    durable: set[BlockKey] = field(default_factory=set)
    dropped: set[BlockKey] = field(default_factory=set)
    handles: dict[BlockKey, int] = field(default_factory=dict)


STRICT = dataclasses.replace(CONFIG, recovery="strict")
"""What a crash leaves behind is never taken for damage: every check opens in strict mode."""


def open_tier(disk: FaultyDisk, config: SsdConfig = CONFIG) -> SsdTier:
    return SsdTier("memory", config, port=disk)


def write(tier: SsdTier, ledger: Ledger, seeds: range, *, durable: bool) -> None:
    blocks = MAKER.chain(list(seeds), ROOT_PARENT)
    ledger.blocks |= {block.key: bytes(block.stored) for block in blocks}
    handles = tier.write(MAKER.namespace_id, blocks, durable=durable)
    ledger.handles |= dict(zip((block.key for block in blocks), handles, strict=True))
    if durable:
        ledger.durable |= {block.key for block in blocks}


def write_apart(tier: SsdTier, ledger: Ledger, seeds: range) -> None:
    """One write of blocks of as many chains."""
    blocks = [MAKER.block(seed, ROOT_PARENT) for seed in seeds]
    ledger.blocks |= {block.key: bytes(block.stored) for block in blocks}
    handles = tier.write(MAKER.namespace_id, blocks, durable=True)
    ledger.handles |= dict(zip((block.key for block in blocks), handles, strict=True))
    ledger.durable |= {block.key for block in blocks}


def drop(tier: SsdTier, ledger: Ledger, seeds: range) -> None:
    keys = [MAKER.key(seed) for seed in seeds]
    # From here on each may be there or not, until the drop is durable.
    ledger.durable -= set(keys)
    tier.drop([ledger.handles[key] for key in keys])


def script(disk: FaultyDisk, ledger: Ledger) -> None:
    """Runs, single blocks, drops, a checkpoint, rewriting, reclaim, reuse, and a clean restart."""
    tier = open_tier(disk)
    try:
        list(tier.recover())
        tier.put_namespace(MAKER.spec, NamespacePolicy(), "script")
        write(tier, ledger, range(6), durable=True)
        write(tier, ledger, range(10, 12), durable=False)
        write(tier, ledger, range(20, 23), durable=True)
        drop(tier, ledger, range(3, 6))
        tier.flush()
        ledger.durable |= {MAKER.key(seed) for seed in range(10, 12)}
        ledger.dropped |= {MAKER.key(seed) for seed in range(3, 6)}
        for seed in range(100, 117):
            write(tier, ledger, range(seed, seed + 1), durable=seed % 2 == 0)
        drop(tier, ledger, range(100, 115))
        tier.compact(0.1)
        tier.reclaim(1 << 16)
        write(tier, ledger, range(200, 204), durable=True)
        # A segment dies, its drops are not yet durable, and the next writes want to use it again.
        write(tier, ledger, range(500, 515), durable=True)
        drop(tier, ledger, range(500, 515))
        for seed in range(520, 530):
            write(tier, ledger, range(seed, seed + 1), durable=False)
        # Its drops become durable with others, it is kept for later, and one write of many runs fills and closes it.
        drop(tier, ledger, range(520, 530))
        tier.flush()
        write_apart(tier, ledger, range(600, 612))
        tier.housekeeping()
        tier.close()
        tier = open_tier(disk)
        ledger.handles = {one.key: one.handle for one in tier.recover()}
        write(tier, ledger, range(300, 303), durable=True)
        drop(tier, ledger, range(20, 22))
        tier.compact(0.1)
        write(tier, ledger, range(400, 401), durable=True)
    finally:
        tier.close()


def check(disk: FaultyDisk, ledger: Ledger, where: str) -> None:
    """Reopen: every block found is one that was written, with its bytes; none that is durable is missing."""
    tier = open_tier(disk, STRICT)
    try:
        found = {one.key: one for one in tier.recover()}
        assert found.keys() <= ledger.blocks.keys(), f"{where}: phantoms"
        assert ledger.durable <= found.keys(), f"{where}: lost {len(ledger.durable - found.keys())} durable blocks"
        assert not ledger.dropped & found.keys(), f"{where}: a dropped block came back"
        for key, one in found.items():
            into = memoryview(bytearray(len(ledger.blocks[key])))
            (status,) = tier.read([BlockRead(one.handle, key, into)])
            assert status is ReadStatus.OK, f"{where}: {key.hex()} is not whole"
            assert bytes(into) == ledger.blocks[key], f"{where}: wrong bytes"
        assert tier.usage().ledger_bytes == disk.used_bytes() <= CONFIG.capacity_bytes, where
        assert not [name for name in disk.image() if name.endswith(".tmp")], where
        if MAKER.namespace_id in {spec.namespace_id for spec, _, _ in tier.namespaces()}:
            write(tier, Ledger(), range(900, 902), durable=True)
    finally:
        tier.close()


def run(disk: FaultyDisk) -> Ledger:
    ledger = Ledger()
    try:
        script(disk, ledger)
    except (KVStoreError, OSError):
        assert disk.cut_after is not None or disk.failed
    return ledger


@pytest.fixture(scope="module")
def mutations() -> int:
    disk = FaultyDisk()
    ledger = run(disk)
    assert MAKER.key(400) in ledger.durable
    return disk.mutations


@pytest.mark.parametrize("mode", Crash)
def test_a_cut_after_every_mutation(mutations, mode):
    for cut in range(mutations + 1):
        cut_and_check(cut, mode, seeds=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [Crash.REORDERED, Crash.TORN])
def test_a_cut_after_every_mutation_with_many_seeds(mutations, mode):
    for cut in range(mutations + 1):
        cut_and_check(cut, mode, seeds=20)


def cut_and_check(cut: int, mode: Crash, *, seeds: int) -> None:
    disk = FaultyDisk()
    disk.cut_after = cut
    ledger = run(disk)
    for seed in range(seeds):
        after = disk.crash(mode, seed * 100003 + cut)
        check(after, ledger, f"cut after {cut} ({disk.log[-1]}), {mode.value}, seed {seed}")


def test_every_call_failing_once(mutations):
    """Fail call N for N = 1, 2, 3, ... until the script runs through: a failed call never costs a durable block."""
    number = 0
    while True:
        number += 1
        disk = FaultyDisk()
        disk.fail = lambda at, _kind, _name, number=number: errno.EIO if at == number else 0
        ledger = run(disk)
        if disk.operations < number:
            break
        disk.fail = lambda *_: 0
        check(disk.crash(Crash.KILL), ledger, f"call {number} ({disk.log[number - 1]}) failed")
        check(disk.crash(Crash.LOST), ledger, f"call {number} ({disk.log[number - 1]}) failed, then power was lost")
    assert number > mutations


@pytest.mark.parametrize("moment", ["pwrite", "fdatasync"])
def test_a_drop_that_races_with_a_move_is_not_undone(moment):
    """The drop is queued before the move's frame (while its bytes are written) or behind it (while they are synced)."""
    disk, ledger = FaultyDisk(), Ledger()
    tier = open_tier(disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "race")
    for seed in range(20):
        write(tier, ledger, range(seed, seed + 1), durable=True)
    drop(tier, ledger, range(6))
    tier.flush()
    raced: list[str] = []

    def race(_number: int, kind: str, name: str) -> int:
        if kind == moment and name.startswith("segment") and not raced:
            raced.append(name)
            tier.drop([ledger.handles[MAKER.key(6)]])
        return 0

    disk.fail = race
    tier.compact(0.1)
    disk.fail = lambda *_: 0
    assert raced
    if moment == "fdatasync":
        tier.flush()
    after = disk.crash(Crash.LOST)
    tier.close()
    ledger.durable.discard(MAKER.key(6))
    ledger.dropped |= {MAKER.key(seed) for seed in range(7)}
    check(after, ledger, moment)
