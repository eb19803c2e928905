"""Match is pure; fetch pins or makes a job; a failed load is a miss and its entry is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.errors import InvalidArgument, UnknownJob, UnknownLease, UnknownNamespace
from kvstore.core.types import Area, BlockKey, JobId, NamespaceId, Outcome, Reason, Target, Tier, WritePolicy
from kvstore.store.config import StoreConfig
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import SPEC

DEVICE, HOST, SSD = (tier.bit for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))
HIT, MISS, PENDING, BUSY = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.BUSY


def on_ssd_only(world, keys):
    world.put(keys)
    world.run()
    assert world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys).outcomes == (HIT,) * len(keys)
    assert world.residency(keys) == (SSD,) * len(keys)
    return keys


def test_match_is_pure(world):
    keys = world.chain(1, 3)
    world.put(keys)

    def looked_at():
        status = world.store.status()
        # That it was asked is all that it leaves behind.
        found = status.counters.pop("match_found", 0)
        return found, (world.store.show_block(keys[0]), status, world.store.last_event)

    _, before = looked_at()
    for _ in range(3):
        assert world.cache.match(world.namespace_id, keys).matched == 3
    assert looked_at() == (9, before)


def test_match_stops_at_the_first_missing_block_and_says_why(world):
    keys = world.chain(1, 4)
    world.put(keys)
    world.cache.remove(world.namespace_id, keys[2:3])
    found = world.cache.match(world.namespace_id, keys)
    assert (found.matched, found.reason) == (2, Reason.REMOVED)
    assert world.cache.match(world.namespace_id, []).matched == 0


def test_no_namespace_hits_the_blocks_of_another(world):
    other = world.cache.open_namespace(replace(SPEC, salt=b"tenant")).namespace_id
    keys = world.chain(1, 2)
    world.put(keys)
    lease = world.cache.grant_lease("x", 1000)
    missed = world.cache.match(other, keys)
    assert (missed.matched, missed.reason) == (0, Reason.NEVER_STORED)
    assert missed.near[0].fields == ("salt",)
    assert world.cache.fetch(other, keys, Target.IN_PLACE, lease_id=lease).outcomes == (MISS,) * 2
    assert world.cache.prefetch(other, keys, Tier.HOST).outcomes == (MISS,) * 2
    assert world.cache.hold(lease, other, keys) == (False, False)
    assert world.cache.remove(other, keys) == (MISS, MISS)
    assert world.cache.reserve(other, Tier.HOST, keys=keys).outcomes == (PENDING, PENDING)
    assert world.store.pin("p", other, keys) == (MISS, MISS)
    assert world.store.evict(Tier.HOST, namespace_id=other, keys=keys).outcomes == (MISS, MISS)
    assert world.store.why(other, keys=keys).matched == 0
    assert len(world.residency(keys)) == 2


@pytest.mark.parametrize("target", [Target.IN_PLACE, Target.HOST])
def test_blocks_in_host_are_pinned_where_they_lie(world, target):
    keys = world.chain(1, 3)
    world.put(keys)
    lease = world.cache.grant_lease("x", 1000)
    found = world.cache.fetch(world.namespace_id, keys, target, lease_id=lease)
    assert found.outcomes == (HIT,) * 3
    assert found.job_id == 0
    assert all(place.area is Area.HOST for place in found.places)
    assert world.store.leases()[0].pins == 3
    assert world.cache.fetch(world.namespace_id, keys, target, lease_id=lease).places == found.places
    assert world.store.leases()[0].pins == 3
    assert world.cache.remove(world.namespace_id, keys) == (BUSY,) * 3


@pytest.mark.parametrize("target", [Target.IN_PLACE, Target.HOST, Target.DEVICE, Target.BUFFER])
def test_blocks_come_from_ssd_by_a_job(world, target):
    keys = on_ssd_only(world, world.chain(1, 3))
    lease = world.cache.grant_lease("x", 1000)
    started = world.cache.fetch(world.namespace_id, keys, target, lease_id=lease)
    assert started.outcomes == (PENDING,) * 3
    assert world.cache.wait_job(started.job_id, 0).outcomes == (PENDING,) * 3
    world.run()
    done = world.cache.wait_job(started.job_id, 0)
    assert done.outcomes == (HIT,) * 3
    area = {Target.DEVICE: Area.DEVICE, Target.BUFFER: Area.BUFFER}.get(target, Area.HOST)
    for key, place in zip(keys, done.places, strict=True):
        assert place.area is area
        assert world.read(world.cache, place, key)
    with pytest.raises(UnknownJob):
        world.cache.wait_job(started.job_id, 0)


def test_the_blocks_of_one_job_are_read_from_the_disk_together(world, disk):
    keys = on_ssd_only(world, world.chain(1, 5))
    world.fetch(keys)
    assert disk.reads == [tuple(keys)]


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("where", ["host", "device", "ssd"])
def test_a_range_of_layers_lands_in_the_buffer(world, where, layers):
    keys = world.chain(1, 2)
    if where == "ssd":
        on_ssd_only(world, keys)
    else:
        world.put(keys, tier=Tier.DEVICE if where == "device" else Tier.HOST)
    lease = world.cache.grant_lease("x", 1000)
    started = world.cache.fetch(world.namespace_id, keys, Target.BUFFER, lease_id=lease, layers=layers)
    world.run()
    done = world.cache.wait_job(started.job_id, 0)
    assert done.outcomes == (HIT, HIT)
    for key, place in zip(keys, done.places, strict=True):
        assert world.read(world.cache, place, key, layers)
    assert world.store.sessions()[0].buffer_used_bytes == 2 * 4096
    assert world.cache.release(lease) == 2
    assert world.store.sessions()[0].buffer_used_bytes == 0


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_a_layer_range_moves_the_place_in_an_arena(world, tier):
    (key,) = world.chain(1, 1)
    world.put([key], tier=tier)
    lease = world.cache.grant_lease("x", 1000)
    found = world.cache.fetch(world.namespace_id, [key], Target.IN_PLACE, lease_id=lease, layers=(1, 3))
    assert world.read(world.cache, found.places[0], key, (1, 3))


def test_device_blocks_are_copied_to_host_for_a_demoting_engine(world):
    keys = world.chain(1, 3)
    hot = world.cache.grant_lease("hot", 10_000)
    world.put(keys, tier=Tier.DEVICE, lease_id=hot)
    cold = world.cache.grant_lease("cold", 10_000)
    started = world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=cold)
    world.run()
    done = world.cache.wait_job(started.job_id, 0)
    assert all(world.read(world.cache, p, k) and p.area is Area.HOST for p, k in zip(done.places, keys, strict=True))
    world.cache.release(hot)
    got = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=16)
    assert got.outcomes == (PENDING,) * 16
    assert [r & (DEVICE | HOST) for r in world.residency(keys)] == [HOST] * 3


def test_partial_success_is_told_key_by_key(world, disk):
    keys = on_ssd_only(world, world.chain(1, 4))
    disk.corrupt(keys[2])
    found = world.fetch([*keys, *world.chain(9, 1)])
    assert found.outcomes == (HIT, HIT, MISS, HIT, MISS)
    assert found.reasons[2:] == (Reason.QUARANTINED, Reason.NONE, Reason.NEVER_STORED)
    assert world.cache.match(world.namespace_id, keys).reason is Reason.QUARANTINED
    assert len(world.residency(keys)) == 2
    assert world.store.status().counters["corrupt_blocks"] == 1


def test_a_corrupt_slice_is_never_served_from_a_layer_read(world, disk):
    keys = on_ssd_only(world, world.chain(1, 2))
    disk.corrupt(keys[1])
    assert world.fetch(keys, Target.BUFFER).outcomes == (HIT, MISS)
    assert len(world.residency(keys)) == 1
    assert world.store.sessions()[0].buffer_used_bytes == 4096


def test_a_degraded_disk_is_a_miss_and_comes_back(world, disk):
    keys = on_ssd_only(world, world.chain(1, 2))
    disk.degraded = True
    found = world.fetch(keys)
    assert found.outcomes == (MISS, MISS)
    assert found.reasons == (Reason.TIER_UNAVAILABLE,) * 2
    missed = world.cache.match(world.namespace_id, keys)
    assert (missed.matched, missed.reason) == (0, Reason.TIER_UNAVAILABLE)
    disk.degraded = False
    world.store.tick()
    assert world.residency(keys) == (SSD, SSD)
    assert world.fetch(keys).outcomes == (HIT, HIT)


def test_a_block_that_can_not_be_read_is_forgotten_when_the_disk_is_well(world, disk):
    keys = on_ssd_only(world, world.chain(1, 2))
    disk.unreadable.add(keys[1])
    assert world.fetch(keys).reasons == (Reason.NONE, Reason.TIER_UNAVAILABLE)
    assert len(world.residency(keys)) == 1
    assert disk.keys() == keys[:1]


def test_no_space_to_promote_is_busy_with_numbers(make_world, disk):
    world = make_world(host_blocks=3, disk=disk)
    keys = on_ssd_only(world, world.chain(1, 2))
    pinned = world.chain(2, 3)
    lease = world.cache.grant_lease("all", 10_000)
    world.put(pinned, lease_id=lease)
    found = world.fetch(keys)
    assert found.outcomes == (BUSY, BUSY)
    assert (found.busy.tier, found.busy.needed_bytes, found.busy.free_bytes, found.busy.evictable_bytes) == (
        Tier.HOST, 8192, 0, 0,
    )  # fmt: skip
    assert world.residency(keys) == (SSD, SSD)


def test_blocks_larger_than_host_in_all_are_fetched_as_far_as_they_fit(make_world, disk):
    world = make_world(host_blocks=5, disk=disk)
    keys = []
    for number in range(3):
        keys += on_ssd_only(world, world.chain(number, 3))
    found = world.fetch(keys)
    assert found.outcomes == (HIT,) * 5 + (BUSY,) * 4


def test_two_jobs_for_the_same_blocks_read_them_once(make_world, disk):
    world = make_world(disk=disk)
    keys = on_ssd_only(world, world.chain(1, 3))
    first, second = (world.cache.grant_lease(name, 1000) for name in "ab")
    jobs = [world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=one).job_id for one in (first, second)]
    world.run()
    assert [world.cache.wait_job(job, 0).outcomes for job in jobs] == [(HIT,) * 3] * 2
    assert disk.reads == [tuple(keys)]


def test_prefetch_promotes_without_pinning(world):
    keys = on_ssd_only(world, world.chain(1, 3))
    started = world.cache.prefetch(world.namespace_id, keys, Tier.DEVICE)
    assert started.outcomes == (PENDING,) * 3
    world.run()
    assert world.cache.wait_job(started.job_id, 0).outcomes == (HIT,) * 3
    assert world.residency(keys) == (DEVICE | HOST | SSD,) * 3
    assert world.store.status().counters["copies_pinned"] == 0
    assert world.cache.prefetch(world.namespace_id, keys, Tier.DEVICE).job_id == 0


def test_a_lease_that_ends_before_its_job_gets_nothing(world):
    keys = on_ssd_only(world, world.chain(1, 2))
    lease = world.cache.grant_lease("short", 100)
    started = world.cache.fetch(world.namespace_id, keys, Target.BUFFER, lease_id=lease)
    world.clock.advance(1)
    world.store.tick()
    world.run()
    assert world.cache.wait_job(started.job_id, 0).outcomes == (MISS, MISS)
    assert world.store.sessions()[0].buffer_used_bytes == 0
    assert world.store.status().counters["copies_pinned"] == 0


def test_a_full_load_queue_is_busy(make_world, disk):
    world = make_world(disk=disk, config=StoreConfig(load_queue_max=1))
    keys = on_ssd_only(world, world.chain(1, 2))
    lease = world.cache.grant_lease("x", 1000)
    first = world.cache.fetch(world.namespace_id, keys[:1], Target.HOST, lease_id=lease)
    second = world.cache.fetch(world.namespace_id, keys[1:], Target.HOST, lease_id=lease)
    assert (first.outcomes, second.outcomes, second.job_id) == ((PENDING,), (BUSY,), 0)
    assert world.store.status().counters["loads_refused_queue_full"] == 1
    world.run()
    assert world.cache.wait_job(first.job_id, 0).outcomes == (HIT,)
    assert world.store.status().counters["blocks_held"] == 0


def test_answers_of_jobs_are_kept_for_a_time(world):
    keys = on_ssd_only(world, world.chain(1, 1))
    started = world.cache.prefetch(world.namespace_id, keys, Tier.HOST)
    world.run()
    world.clock.advance(59)
    world.store.tick()
    assert world.store.status().jobs == 1
    world.clock.advance(2)
    world.store.tick()
    with pytest.raises(UnknownJob):
        world.cache.wait_job(started.job_id, 0)


def test_a_job_is_told_once_unless_someone_waits_for_it(world):
    keys = on_ssd_only(world, world.chain(1, 2))
    told = []
    world.store.on_job_done(lambda session, job, result: told.append((session, job, result.outcomes)))
    lease = world.cache.grant_lease("x", 1000)
    started = world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease)
    world.run()
    assert told == [(world.cache.session_id, started.job_id, (HIT, HIT))]


def test_waiting_fetches_answer_with_the_places(make_world, disk):
    world = make_world(disk=disk, threads=1)
    keys = world.chain(1, 3)
    world.put(keys)
    world.cache.flush()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    told = []
    world.store.on_job_done(lambda *arguments: told.append(arguments))
    lease = world.cache.grant_lease("x", 60_000)
    found = world.cache.fetch(world.namespace_id, keys, Target.DEVICE, lease_id=lease, wait_ms=60_000)
    assert (found.outcomes, found.job_id, told) == ((HIT,) * 3, 0, [])
    assert all(world.read(world.cache, p, k) for p, k in zip(found.places, keys, strict=True))


def test_a_second_use_writes_a_second_hit_block(make_world, disk):
    world = make_world(disk=disk, write=WritePolicy.SECOND_HIT)
    keys = world.chain(1, 2)
    world.put(keys)
    world.run()
    assert disk.keys() == []
    world.fetch(keys[:1])
    world.run()
    assert disk.keys() == keys[:1]
    world.fetch(keys[:1])
    world.run()
    assert len(disk.writes) == 1


@pytest.mark.parametrize("layers", [(-1, 1), (0, 0), (2, 1), (0, 4), (3, 4)])
def test_bad_layer_ranges(world, layers):
    lease = world.cache.grant_lease("x", 1000)
    with pytest.raises(InvalidArgument, match="layer_"):
        world.cache.fetch(world.namespace_id, world.chain(1, 1), Target.BUFFER, lease_id=lease, layers=layers)


def test_bad_fetches(world):
    (key,) = world.chain(1, 1)
    lease = world.cache.grant_lease("x", 1000)
    with pytest.raises(UnknownNamespace):
        world.cache.match(NamespaceId(b"n" * 32), [key])
    with pytest.raises(InvalidArgument, match="namespace_id is 3 bytes"):
        world.cache.match(NamespaceId(b"abc"), [key])
    with pytest.raises(InvalidArgument, match=r"keys\[1\] is 4 bytes"):
        world.cache.match(world.namespace_id, [key, BlockKey(b"four")])
    with pytest.raises(UnknownLease):
        world.cache.fetch(world.namespace_id, [key], Target.HOST, lease_id=lease + 1)
    with pytest.raises(InvalidArgument, match="wait_ms"):
        world.cache.fetch(world.namespace_id, [key], Target.HOST, lease_id=lease, wait_ms=-1)
    with pytest.raises(InvalidArgument, match="target"):
        world.cache.fetch(world.namespace_id, [key], 9, lease_id=lease)
    with pytest.raises(UnknownJob):
        world.cache.wait_job(JobId(1 << 40), 0)
    with pytest.raises(InvalidArgument, match="tier"):
        world.cache.prefetch(world.namespace_id, [key], Tier.SSD)


def test_targets_that_this_store_or_session_does_not_have(make_world):
    world = make_world(device_blocks=0, disk=MemoryDisk())
    lease = world.cache.grant_lease("x", 1000)
    with pytest.raises(InvalidArgument, match="no DEVICE tier"):
        world.cache.fetch(world.namespace_id, [], Target.DEVICE, lease_id=lease)
    bare = world.session("bare")
    lease = bare.grant_lease("x", 1000)
    with pytest.raises(InvalidArgument, match="without a buffer"):
        bare.fetch(world.namespace_id, [], Target.BUFFER, lease_id=lease)
    with pytest.raises(InvalidArgument, match="without a buffer"):
        bare.reserve(world.namespace_id, Tier.HOST, count=1)


@pytest.mark.parametrize("target", [Target.IN_PLACE, Target.BUFFER])
def test_a_place_has_a_version_that_lasts_as_long_as_its_bytes(world, target):
    keys = world.chain(1, 1)
    world.put(keys)
    lease = world.cache.grant_lease("reader", 60_000)

    def fetch():
        fetched = world.cache.fetch(world.namespace_id, keys, target, lease_id=lease, wait_ms=0)
        world.run()
        return (fetched if fetched.outcomes == (HIT,) else world.cache.wait_job(fetched.job_id, 0)).places[0]

    def version(place):
        (session,) = world.store._state.owners.sessions.values()
        arena = world.store.host if place.area is Area.HOST else session.buffer
        return arena.versions[place.offset // 4096]

    told = fetch()
    assert told.version == version(told) > 0
    world.cache.release(lease)
    if target is Target.IN_PLACE:
        assert told.version == version(told), "the block is still there"
        world.cache.remove(world.namespace_id, keys)
    assert told.version < version(told), "another block's bytes may come there now"


def test_what_was_asked_for_is_counted_by_what_came_of_it(world):
    keys = world.chain(1, 4)
    world.put(keys)
    world.cache.remove(world.namespace_id, keys[3:])
    missing = world.chain(9, 1)
    world.cache.match(world.namespace_id, keys)
    lease = world.cache.grant_lease("x", 1000)
    world.cache.fetch(world.namespace_id, [*keys, *missing], Target.HOST, lease_id=lease, wait_ms=5000)
    counters = world.store.status().counters
    asked = {name: count for name, count in counters.items() if name.startswith(("match_", "fetch_"))}
    assert asked == {
        "match_found": 3,
        "match_missed_removed": 1,
        "fetch_found_host": 3,
        "fetch_missed_removed": 1,
        "fetch_missed_never_stored": 1,
    }
