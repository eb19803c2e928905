"""What goes to SSD when, what a durable commit promises, and what a restart finds."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvstore.core.errors import InvalidArgument, TierFull, TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Durability, Outcome, Reason, Target, Tier, WritePolicy
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.embedded import build_store
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import ON_DEVICE, SPEC, STORED
from kvstore.tiers.ssd import SsdConfig, SsdTier

DEVICE, HOST, SSD = (tier.bit for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))
HIT, MISS, PENDING, BUSY = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.BUSY


def test_through_writes_in_the_background_as_one_run(world, disk):
    keys = world.chain(1, 5)
    world.put(keys)
    assert world.residency(keys) == (HOST,) * 5
    world.run()
    assert world.residency(keys) == (HOST | SSD,) * 5
    assert disk.writes == [tuple(keys)]


def test_extents_hold_one_chain_and_have_a_bound(make_world, disk):
    world = make_world(disk=disk, config=StoreConfig(extent_blocks_max=4))
    a, b = world.chain(1, 6), world.chain(2, 2)
    world.put(a)
    world.put(b)
    world.run()
    assert sorted(disk.writes) == sorted([tuple(a[:4]), tuple(a[4:]), tuple(b)])


def test_device_blocks_go_to_ssd_by_way_of_host(world, disk):
    keys = world.chain(1, 3)
    world.put(keys, tier=Tier.DEVICE)
    world.run()
    assert world.residency(keys) == (DEVICE | HOST | SSD,) * 3
    assert disk.writes == [tuple(keys)]


def test_back_writes_when_host_needs_the_room(make_world, disk):
    world = make_world(host_blocks=3, disk=disk, write=WritePolicy.BACK)
    keys = world.chain(1, 3)
    world.put(keys)
    world.run()
    assert disk.keys() == []
    world.put(world.chain(2, 1))
    assert disk.keys() == keys
    assert world.residency(keys) == (HOST | SSD, HOST | SSD, SSD)
    assert world.store.status().counters["host_demoted"] == 1


def test_a_flush_makes_removals_durable_too(make_world, disk, monkeypatch):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    world.cache.flush()
    synced = []
    monkeypatch.setattr(disk, "flush", lambda: synced.append(sorted(disk.keys())))
    world.cache.flush()
    assert synced == []
    world.cache.remove(world.namespace_id, keys[1:])
    world.cache.flush()
    world.cache.flush()
    assert synced == [keys[:1]]


def test_second_hit_drops_what_was_used_once(make_world, disk):
    world = make_world(host_blocks=3, disk=disk, write=WritePolicy.SECOND_HIT)
    keys = world.chain(1, 3)
    world.put(keys)
    world.put(world.chain(2, 1))
    assert disk.keys() == []
    missed = world.cache.match(world.namespace_id, keys)
    assert (missed.matched, missed.reason) == (2, Reason.EVICTED)


def test_a_device_reservation_drops_what_has_a_colder_copy(world):
    keys = world.chain(1, 16)
    world.put(keys, tier=Tier.DEVICE)
    world.run()
    assert world.cache.reserve(world.namespace_id, Tier.DEVICE, count=3).outcomes == (PENDING,) * 3
    assert [bool(r & DEVICE) for r in world.residency(keys)] == [True] * 13 + [False] * 3


def test_a_device_reservation_that_needs_demotion_is_busy_until_it_is_done(make_world):
    world = make_world(write=WritePolicy.BACK)
    keys = world.chain(1, 16)
    world.put(keys, tier=Tier.DEVICE)
    refused = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1)
    assert refused.outcomes == (BUSY,)
    assert (refused.busy.needed_bytes, refused.busy.free_bytes, refused.busy.evictable_bytes) == (
        ON_DEVICE, 0, 16 * ON_DEVICE,
    )  # fmt: skip
    assert world.residency(keys) == (DEVICE,) * 16
    world.run()
    assert world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1).outcomes == (PENDING,)
    assert world.residency(keys)[-1] == HOST


def test_nothing_evictable_is_said_with_numbers(make_world):
    world = make_world(device_blocks=2)
    lease = world.cache.grant_lease("x", 60_000)
    world.put(world.chain(1, 2), tier=Tier.DEVICE, lease_id=lease)
    busy = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1).busy
    assert (busy.tier, busy.free_bytes, busy.evictable_bytes, busy.reason) == (Tier.DEVICE, 0, 0, Reason.NO_SPACE)


def test_a_durable_commit_survives_the_crash_with_its_ancestors(make_world, disk):
    world = make_world(disk=disk, write=WritePolicy.BACK)
    keys = world.chain(1, 4)
    world.put(keys[:2])
    done = world.put(keys[2:3], parent=keys[1], durability=Durability.DURABLE)
    assert done.outcomes == (HIT,)
    world.put(keys[3:], parent=keys[2])
    again = make_world(disk=disk.crashed())
    assert again.residency(keys) == (SSD,) * 3
    assert again.fetch(keys[:3]).outcomes == (HIT,) * 3


def test_durable_after_through_syncs_what_was_written_without(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 3)
    world.put(keys[:2])
    world.run()
    assert len(make_world(disk=disk.crashed()).residency(keys)) == 0
    world.put(keys[2:], parent=keys[1], durability=Durability.DURABLE)
    assert len(make_world(disk=disk.crashed()).residency(keys)) == 3


@pytest.mark.parametrize(
    ("failure", "reason"), [(TierUnavailable, Reason.TIER_UNAVAILABLE), (TierFull, Reason.NO_SPACE)]
)
def test_a_durable_commit_that_can_not_be_is_a_miss_with_the_reason(world, disk, failure, reason):
    keys = world.chain(1, 2)
    disk.fail_writes = failure
    done = world.put(keys, durability=Durability.DURABLE)
    assert (done.outcomes, done.reasons) == ((MISS, MISS), (reason, reason))
    assert world.residency(keys) == (HOST, HOST)
    assert world.store.status().counters[f"ssd_writes_dropped_{reason.name.lower()}"] == 2
    disk.fail_writes = None
    world.cache.flush()
    assert world.residency(keys) == (HOST | SSD,) * 2


def test_durable_needs_a_disk(make_world):
    world = make_world()
    keys = world.chain(1, 2)
    for _ in range(2):
        done = world.put(keys, durability=Durability.DURABLE)
        assert (done.outcomes, done.reasons) == ((MISS, MISS), (Reason.TIER_UNAVAILABLE,) * 2)
    assert world.residency(keys) == (HOST, HOST)
    with pytest.raises(InvalidArgument, match="durability"):
        world.cache.open_namespace(SPEC, policy=NamespacePolicy(durability=Durability.DURABLE))


def test_flush_writes_everything_parents_first_and_syncs(make_world, disk):
    world = make_world(disk=disk, write=WritePolicy.BACK)
    a, b = world.chain(1, 3), world.chain(2, 3)
    world.put(a[:2])
    world.put(b)
    world.put(a[2:], parent=a[1])
    assert world.cache.flush() == 6
    assert sorted(disk.writes, key=len) == sorted([tuple(a), tuple(b)], key=len)
    assert world.cache.flush() == 0
    again = make_world(disk=disk.crashed())
    assert (len(again.residency(a)), len(again.residency(b))) == (3, 3)


def test_a_full_disk_drops_its_coldest_leaves(make_world):
    disk = MemoryDisk(6 * STORED)
    world = make_world(disk=disk, config=StoreConfig(ssd=Watermarks(1.0, 1.0)))
    old, new = world.chain(1, 4), world.chain(2, 4)
    world.put(old)
    world.run()
    world.put(new)
    world.run()
    assert world.residency(new) == (HOST | SSD,) * 4
    assert world.residency(old) == (HOST | SSD,) * 2 + (HOST,) * 2
    assert disk.used_bytes <= disk.capacity_bytes


def test_watermarks_keep_room_free(make_world):
    disk = MemoryDisk(10 * STORED)
    marks = Watermarks(high=0.8, low=0.5)
    world = make_world(
        host_blocks=20, device_blocks=20, disk=disk, config=StoreConfig(device=marks, host=marks, ssd=marks)
    )
    world.put(world.chain(1, 16), tier=Tier.DEVICE)
    assert world.store.status().tiers[0].used_bytes == 16 * ON_DEVICE
    world.run()
    device, host, ssd = world.store.status().tiers
    assert device.used_bytes == 16 * ON_DEVICE
    world.put(world.chain(2, 1), tier=Tier.DEVICE)
    world.run()
    device, host, ssd = world.store.status().tiers
    assert device.used_bytes <= 0.5 * device.capacity_bytes
    assert host.used_bytes <= 0.8 * host.capacity_bytes
    assert ssd.used_bytes <= 0.8 * ssd.capacity_bytes


def test_a_full_write_queue_is_counted_and_eviction_writes_later(make_world, disk):
    world = make_world(host_blocks=8, disk=disk, config=StoreConfig(write_queue_max=2))
    keys = world.chain(1, 5)
    world.put(keys)
    world.run()
    assert world.residency(keys) == (HOST | SSD,) * 2 + (HOST,) * 3
    assert world.store.status().counters["ssd_writes_dropped_queue_full"] == 3
    world.store.evict(Tier.HOST, nbytes=5 * STORED)
    assert world.residency(keys) == (SSD,) * 5


def test_memory_goes_on_without_a_disk_that_is_degraded(make_world, disk):
    world = make_world(host_blocks=4, disk=disk)
    disk.degraded = True
    for number in range(6):
        assert world.put(world.chain(number, 2)).outcomes == (HIT, HIT)
        world.run()
    assert world.residency(world.chain(5, 2)) == (HOST, HOST)
    assert world.store.status().tiers[2].state == "degraded"
    assert any("degraded" in warning for warning in world.store.status().warnings)


def test_a_block_removed_while_it_is_written_does_not_come_back(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    disk.before_write = lambda: world.cache.remove(world.namespace_id, keys)
    world.run()
    assert world.residency(keys) == ()
    assert disk.keys() == []
    assert world.store.status().tiers[1].used_bytes == 0
    assert len(world.store._state._book.index) == 0


def test_a_block_stored_again_while_its_old_copy_is_written(make_world, disk):
    world = make_world(disk=disk)
    (key,) = world.chain(1, 1)
    world.put([key])

    def replace_it():
        disk.before_write = lambda: None
        world.cache.remove(world.namespace_id, [key])
        world.put([key])

    disk.before_write = replace_it
    world.run()
    assert world.residency([key]) == (HOST | SSD,)
    assert disk.keys() == [key]
    assert world.store.status().tiers[1].used_bytes == STORED
    assert world.fetch([key]).outcomes == (HIT,)


def test_reads_do_not_wait_for_a_writer_that_hangs(make_world, disk):
    world = make_world(disk=disk, threads=1)
    keys = world.chain(1, 2)
    world.put(keys)
    world.cache.flush()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    writing, go_on = threading.Event(), threading.Event()

    def hang():
        writing.set()
        go_on.wait(30)

    disk.before_write = hang
    world.put(world.chain(2, 1))
    try:
        assert writing.wait(30)
        lease = world.cache.grant_lease("x", 60_000)
        found = world.cache.fetch(world.namespace_id, keys, 3, lease_id=lease, wait_ms=30_000)
        assert found.outcomes == (HIT, HIT)
    finally:
        go_on.set()


def test_a_restart_is_warm(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 4)
    world.put(keys)
    world.close()
    again = make_world(disk=disk)
    assert again.residency(keys) == (SSD,) * 4
    assert again.store.status().recovery.blocks == 4
    assert again.store.namespaces()[0].blocks_by_tier == (0, 0, 4)
    assert again.fetch(keys).outcomes == (HIT,) * 4


def test_orphans_found_at_start_are_reachable_once_their_parent_is_back(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 3)
    world.put(keys)
    world.run()
    disk.flush()
    found = disk.crashed()
    found.drop([h for h, b in found._blocks.items() if b.key == keys[0]])
    again = make_world(disk=found)
    assert again.residency(keys) == ()
    assert again.store.why(again.namespace_id, keys=keys).reason is Reason.NEVER_STORED
    again.put(keys[:1])
    assert again.residency(keys) == (HOST, SSD, SSD)


def test_a_policy_and_a_name_survive_a_restart(make_world, disk):
    world = make_world(disk=disk, write=WritePolicy.BACK)
    world.cache.open_namespace(SPEC, name="demo")
    world.put(world.chain(1, 1))
    world.close()
    store = build_store(StoreConfig(loader_threads=0, writer_threads=0), host_bytes=1 << 20, disk=disk)
    try:
        (report,) = store.namespaces()
        assert (report.name, report.policy.write) == ("demo", WritePolicy.BACK)
    finally:
        store.close()


def test_blocks_of_a_namespace_that_is_not_on_disk_are_dropped(make_world, disk):
    world = make_world(disk=disk)
    world.put(world.chain(1, 2))
    world.run()
    disk.flush()
    found = disk.crashed()
    found._specs.clear()
    again = make_world(disk=found)
    assert again.store.status().counters["recovered_without_namespace"] == 2
    assert found.keys() == []


def test_a_mover_that_dies_goes_on_and_is_counted(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)

    def explode():
        raise RuntimeError("a bug")

    disk.before_write = explode
    world.run()
    assert world.store.status().counters["mover_restarts_writer"] == 1
    assert world.residency(keys) == (HOST, HOST)
    disk.before_write = lambda: None
    assert world.cache.flush() == 2
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    disk.before_read = explode
    found = world.fetch(keys)
    assert (found.outcomes, found.reasons) == ((MISS, MISS), (Reason.DROPPED,) * 2)
    disk.before_read = lambda: None
    assert world.fetch(keys).outcomes == (HIT, HIT)
    counters = world.store.status().counters
    assert (counters["mover_restarts_loader"], counters["blocks_held"], counters["copies_filling"]) == (1, 0, 0)


def test_the_first_raw_tokens_are_a_policy_of_depth(make_world):
    world = make_world(device_blocks=4)
    spec = replace(SPEC, codec="int8", head_dim=8)
    policy = NamespacePolicy(raw_first_tokens=16)
    namespace_id = world.cache.open_namespace(spec, policy=policy).namespace_id
    with world.store._state.locked():
        namespace = world.store._state.namespaces.get(namespace_id)
        assert [namespace.codec_at(depth).word for depth in range(3)] == ["raw", "raw", "int8"]


def test_demotion_writes_a_chain_as_one_extent(make_world, disk):
    world = make_world(host_blocks=6, disk=disk, write=WritePolicy.BACK)
    keys = world.chain(1, 6)
    world.put(keys)
    for number in range(2, 6):
        world.put(world.chain(number, 1))
    assert disk.writes == [tuple(keys)]
    assert world.residency(keys) == (HOST | SSD,) * 2 + (SSD,) * 4


def test_the_real_tier_is_warm_after_a_restart(make_world, tmp_path):
    config = SsdConfig(capacity_bytes=64 << 20, segment_bytes=1 << 20)
    world = make_world(disk=SsdTier(str(tmp_path), config), threads=1)
    kept, last = world.chain(1, 4), world.chain(2, 3)
    assert world.put(kept, durability=Durability.DURABLE).outcomes == (HIT,) * 4
    world.put(last, tier=Tier.DEVICE)
    world.close()
    again = make_world(disk=SsdTier(str(tmp_path), config))
    assert again.residency(kept) == (SSD,) * 4
    assert again.residency(last) == (SSD,) * 3
    assert again.fetch(kept, Target.DEVICE).outcomes == (HIT,) * 4
    assert again.fetch(last, Target.BUFFER).outcomes == (HIT,) * 3
    assert violations(again.store) == []
