"""A cap that is lowered between two starts holds when the second says ready, and goes on holding."""

from __future__ import annotations

import contextlib

import pytest

from kvstore.core.errors import TierError, TierFull
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MIB = 1 << 20
MAKER = BlockMaker(NamespaceSpec(model="cap", dtype="float16", layers=2, kv_heads=1, head_dim=64, block_tokens=64))
"""Blocks of 32 KiB and a header."""
CONFIG = {
    "capacity_bytes": 16 * MIB, "read_threads": 1, "write_threads": 1, "commit_interval_s": None,
    "compact_interval_s": None, "io_bytes": 65536, "read_bytes_in_flight": 131072, "write_bytes_in_flight": 131072,
}  # fmt: skip


def start(disk, **settings):
    tier = SsdTier("memory", SsdConfig(**(CONFIG | settings)), port=disk)
    return tier, list(tier.recover())


def write(tier, disk, blocks, held):
    """As the store does: what is oldest goes where there is no room. ``held`` is (handle, block), oldest first."""
    for _ in range(100):
        try:
            handles = tier.write(MAKER.namespace_id, blocks, durable=True)
        except TierFull:
            tier.drop([handle for handle, _ in held[:16]])
            del held[:16]
            tier.reclaim(sum(len(block.stored) for block in blocks))
            continue
        finally:
            assert disk.used_bytes() <= tier.usage().cap_bytes
        held += zip(handles, blocks, strict=True)
        return
    pytest.fail("nothing that was dropped made room")


def filled(shape):
    """A disk filled up to its cap, by one long chain or by many short ones; and the blocks, oldest first."""
    disk = FaultyDisk()
    tier, _ = start(disk)
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "cap")
    held, parent = [], ROOT_PARENT
    for first in range(0, 400, 8):
        blocks = MAKER.chain(list(range(first, first + 8)), parent)
        if shape == "long":
            parent = blocks[-1].key
        write(tier, disk, blocks, held)
    # Holes: every segment has some, the first ones more.
    gone = held[: len(held) // 3 : 2]
    tier.drop([handle for handle, _ in gone])
    tier.flush()
    return tier, disk, [one for one in held if one not in gone]


@pytest.mark.parametrize("end", ["clean", "killed"])
@pytest.mark.parametrize("shape", ["long", "short"])
@pytest.mark.parametrize("factor", [2, 4, 8, 16])
def test_a_lowered_cap_holds_when_the_start_is_ready(shape, factor, end):
    tier, disk, held = filled(shape)
    after = None if end == "clean" else disk.crash(Crash.KILL)
    tier.close()
    disk = after or disk
    cap = CONFIG["capacity_bytes"] // factor
    # An operator's wish is no damage: a strict start takes it, too.
    tier, found = start(disk, capacity_bytes=cap, recovery="strict")
    assert disk.used_bytes() == tier.usage().ledger_bytes <= cap
    assert tier.report.quarantined == 0
    assert tier.state.counters["blocks_over_cap"] == len(held) - len(found)
    # What stays are the newest, but for what shared a segment with older ones.
    names = {block.key: index for index, (_, block) in enumerate(held)}
    assert max(names[one.key] for one in found) == len(held) - 1
    assert min(names[one.key] for one in found) >= len(held) - 2 * len(found) - 32
    expected = {block.key: block for _, block in held}
    for one in found:
        into = memoryview(bytearray(len(expected[one.key].stored)))
        assert tier.read([BlockRead(one.handle, one.key, into)]) == [ReadStatus.OK]
        assert bytes(into) == bytes(expected[one.key].stored)
    # It takes writes, for as long as one likes, and the next start finds nothing to complain of.
    held = [(one.handle, expected[one.key]) for one in found]
    for first in range(1000, 1000 + cap // 16384, 4):
        write(tier, disk, MAKER.chain(list(range(first, first + 4)), ROOT_PARENT), held)
    assert len(held) * 36864 > cap // 3
    tier.close()
    tier, found = start(disk, capacity_bytes=cap, recovery="strict")
    assert len(found) == len(held)
    tier.close()


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_a_crash_while_blocks_are_given_up_is_no_damage(cut):
    tier, disk, _ = filled("short")
    tier.close()
    small = {"capacity_bytes": CONFIG["capacity_bytes"] // 4, "recovery": "strict"}
    disk.cut_after = disk.mutations + cut
    with contextlib.suppress(OSError, TierError):
        start(disk, **small)
    for mode in (Crash.KILL, Crash.LOST, Crash.REORDERED):
        again = disk.crash(mode, cut)
        whole, found = start(again, **small)
        assert found
        assert again.used_bytes() <= small["capacity_bytes"]
        whole.close()


def test_what_was_set_aside_follows_the_cap():
    tier, disk, _ = filled("short")
    tier.close()
    for number in range(1, 5):
        disk.overwrite(f"quarantine/{number:08d}-x", bytes(60_000))
    tier, _ = start(disk, capacity_bytes=2 * MIB)
    assert tier.usage().quarantine_bytes <= 2 * MIB // 64
    assert disk.used_bytes() == tier.usage().ledger_bytes <= 2 * MIB
    tier.close()
