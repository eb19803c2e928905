"""A fourth tier in memory behind SSD: this file, and no edit elsewhere. Any ``DiskTier`` will do in its place."""

from __future__ import annotations

from kvstore.core.types import Durability, Outcome, Target, Tier
from kvstore.rpc.handlers_admin import _tier_message
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk, MemoryStorage
from kvstore.testing.world import STORED, World
from kvstore.tools.kvctl.options import TIER_NAMES

FAR = Tier(4)


class FarMemory(MemoryStorage):
    """Storage that survives the store, as a shared cache elsewhere would: it meets ``tiers.base.DiskTier`` and no more,
    so its space is its own affair."""


def world_over(ssd, far, **options):
    return World(host_blocks=8, device_blocks=0, disk=ssd, colder=[far], **options)


def test_blocks_go_down_to_a_fourth_tier_and_come_back():
    ssd, far = MemoryDisk(capacity_bytes=16 * STORED), FarMemory()
    world = world_over(ssd, far)
    chains = [world.chain(number, 8) for number in range(6)]
    for keys in chains:
        assert set(world.put(keys, durability=Durability.DURABLE).outcomes) == {Outcome.HIT}
        world.run()
    # SSD holds two chains; the oldest went on, and none was lost.
    assert set(world.residency(chains[0])) == {FAR.bit}
    assert all(len(world.residency(keys)) == 8 for keys in chains)
    assert violations(world.store) == []

    # Promoted from there, into memory and into a session's buffer, with the right bytes.
    assert set(world.fetch(chains[0], Target.HOST).outcomes) == {Outcome.HIT}
    for lease in world.store.leases():
        world.clock.advance(lease.seconds_left + 1)
    world.run()
    assert set(world.fetch(chains[1], Target.BUFFER).outcomes) == {Outcome.HIT}

    # Status tells it like any other tier, to kvctl too.
    report = world.store.status().tiers[-1]
    assert (report.tier, report.state, report.capacity_bytes) == (FAR, "ready", far.capacity_bytes)
    assert report.blocks == len(far.keys()) > 0
    assert TIER_NAMES[_tier_message(report).tier] == FAR.name
    assert world.store.show_block(chains[2][0]).places
    assert world.store.verify().bad == 0
    world.close()

    # A restart finds both storages.
    again = world_over(ssd, far)
    assert all(len(again.residency(keys)) == 8 for keys in chains)
    assert violations(again.store) == []

    # One that fails is a miss, and comes back by itself.
    far.degraded = True
    again.run()
    assert again.residency(chains[0]) == ()
    assert set(again.put(again.chain(99, 8), durability=Durability.DURABLE).outcomes) == {Outcome.HIT}
    far.degraded = False
    again.run()
    assert len(again.residency(chains[1])) == 8
    assert violations(again.store) == []
    again.close()
