"""Things that happen between a claim and its publishing, each made to happen by a hook and not by luck."""

from __future__ import annotations

import threading

from kvstore.core.types import Outcome, Target, Tier, WritePolicy
from kvstore.testing.invariants import violations

DEVICE, HOST, SSD = (tier.bit for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))
HIT, MISS, PENDING, BUSY = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.BUSY


def test_a_victim_that_is_pinned_while_it_is_demoted_stays(make_world, disk):
    world = make_world(host_blocks=1, disk=disk, write=WritePolicy.BACK)
    (key,) = world.chain(1, 1)
    world.put([key])
    lease = world.cache.grant_lease("reader", 60_000)
    found = []
    disk.before_write = lambda: found.append(
        world.cache.fetch(world.namespace_id, [key], Target.IN_PLACE, lease_id=lease)
    )
    assert world.put(world.chain(2, 1)).outcomes == (BUSY,)
    assert found[0].outcomes == (HIT,)
    assert world.residency([key]) == (HOST | SSD,)
    assert world.read(world.cache, found[0].places[0], key)
    assert violations(world.store) == []


def test_a_victim_that_gets_a_child_while_it_is_demoted_stays(make_world, disk):
    world = make_world(host_blocks=2, disk=disk, write=WritePolicy.BACK)
    keys = world.chain(1, 2)
    world.put(keys[:1])
    reserved = []

    def commit_a_child():
        disk.before_write = lambda: None
        reserved.append(world.put(keys[1:], parent=keys[0]))

    disk.before_write = commit_a_child
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys[:1])
    assert reserved[0].outcomes == (HIT,)
    assert world.residency(keys) == (HOST | SSD, HOST)
    assert violations(world.store) == []


def test_a_parent_is_not_evicted_to_make_room_for_its_child(make_world):
    world = make_world(host_blocks=2)
    keys = world.chain(1, 2)
    world.put(keys[:1])
    world.put(world.chain(2, 1))
    assert world.put(keys[1:], parent=keys[0]).outcomes == (HIT,)
    assert len(world.residency(keys)) == 2
    assert violations(world.store) == []


def test_what_another_thread_is_reading_is_waited_for(make_world, disk, monkeypatch):
    world = make_world(disk=disk, threads=2)
    keys = world.chain(1, 2)
    world.put(keys)
    world.cache.flush()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    reading, waiting, go_on = threading.Event(), threading.Event(), threading.Event()

    def stop_in_the_read():
        reading.set()
        go_on.wait(30)

    disk.before_read = stop_in_the_read
    movement = world.store._movement
    wait_for_others = movement._wait_for_others

    def tell(slots, tier):
        waiting.set()
        return wait_for_others(slots, tier)

    monkeypatch.setattr(movement, "_wait_for_others", tell)
    leases = [world.cache.grant_lease(name, 60_000) for name in "ab"]
    jobs = [world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=leases[0]).job_id]
    try:
        assert reading.wait(30)
        jobs.append(world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=leases[1]).job_id)
        assert waiting.wait(30)
    finally:
        go_on.set()
    assert [world.cache.wait_job(job, 30_000).outcomes for job in jobs] == [(HIT, HIT)] * 2
    assert disk.reads == [tuple(keys)]


def test_a_block_removed_while_it_is_promoted_is_a_miss_and_leaves_nothing(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    world.run()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    disk.corrupt(keys[1])

    def verify_meanwhile():
        disk.before_read = lambda: None
        assert world.store.verify(namespace_id=world.namespace_id).bad == 1

    disk.before_read = verify_meanwhile
    found = world.fetch(keys)
    assert found.outcomes == (HIT, MISS)
    assert violations(world.store) == []


def test_a_session_that_dies_while_it_commits_leaves_whole_blocks_or_none(make_world, disk):
    world = make_world(host_blocks=1, disk=disk, write=WritePolicy.BACK)
    world.put(world.chain(9, 1))
    (key,) = world.chain(1, 1)
    disk.before_write = world.cache.close
    assert world.put([key]).outcomes == (HIT,)
    status = world.store.status()
    assert (status.sessions, status.reservations) == (0, 0)
    assert violations(world.store) == []
    assert world.store.verify().bad == 0
