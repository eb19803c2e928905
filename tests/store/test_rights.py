"""Rights end with their owner, at once and wholly, and no peer takes all that there is."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.core.errors import ResourceExhausted
from kvstore.core.types import Outcome, Reason, Target, Tier
from kvstore.store.config import StoreConfig
from kvstore.testing.invariants import violations
from kvstore.testing.world import SPEC

NOW = (
    "blocks_held", "copies_pinned", "copies_filling", "copies_doomed", "copies_under_io", "slots_remembered",
    "sessions_with_io", "buffer_used_bytes",
)  # fmt: skip


def on_disk_only(world, keys):
    world.put(keys)
    world.run()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)


def rights(world):
    return {name: value for name, value in world.store.status().counters.items() if name in NOW and value}


def test_released_leases_leave_no_deadline_behind(world):
    for _ in range(1000):
        world.cache.release(world.cache.grant_lease("short", 600_000))
    assert world.store.status().counters["lease_deadlines"] <= 64 + 1
    kept = [world.cache.grant_lease("kept", 1000 * (1 + n)) for n in range(100)]
    for lease in kept[::2]:
        world.cache.release(lease)
    world.clock.advance(50.5)
    world.store.tick()
    assert len(world.store.leases()) == 25


@pytest.mark.parametrize("target", [Target.HOST, Target.BUFFER, Target.DEVICE])
def test_the_end_of_a_lease_ends_its_jobs_that_have_not_begun(make_world, disk, target):
    world = make_world(disk=disk)
    keys = world.chain(1, 3)
    on_disk_only(world, keys)
    lease = world.cache.grant_lease("short", 1000)
    begun = world.cache.fetch(world.namespace_id, keys, target, lease_id=lease)
    assert rights(world)["blocks_held"] == 3
    world.clock.advance(2)
    world.store.tick()
    assert rights(world) == {}
    answer = world.cache.wait_job(begun.job_id, 0)
    assert (answer.outcomes, answer.reasons) == ((Outcome.MISS,) * 3, (Reason.DROPPED,) * 3)
    world.run()
    assert rights(world) == {}
    assert violations(world.store) == []


def test_the_end_of_a_session_ends_its_jobs_that_have_not_begun(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 3)
    on_disk_only(world, keys)
    other = world.store.open_session("other", buffer_bytes=1 << 16)
    other.open_namespace(SPEC)
    other.prefetch(world.namespace_id, keys, Tier.HOST)
    other.fetch(world.namespace_id, keys, Target.BUFFER, lease_id=other.grant_lease("x", 1000))
    other.reserve(world.namespace_id, Tier.HOST, count=2)
    other.close()
    status = world.store.status()
    assert (status.sessions, status.leases, status.reservations, status.jobs) == (1, 0, 0, 0)
    assert rights(world) == {}
    world.run()
    assert violations(world.store) == []


def test_no_peer_takes_all_sessions_and_leases(make_world):
    world = make_world(config=StoreConfig(sessions_max=9, leases_max=8, reservations_max=8, peer_share=0.5))
    mine = [world.store.open_session("far", remote=True, peer="10.0.0.1") for _ in range(5)]
    with pytest.raises(ResourceExhausted, match="has 5 sessions"):
        world.store.open_session("far", remote=True, peer="10.0.0.1")
    leases = [mine[n].grant_lease("x", 1000) for n in range(4)]
    with pytest.raises(ResourceExhausted, match="has 4 leases"):
        mine[4].grant_lease("x", 1000)
    other = world.store.open_session("other", remote=True, peer="10.0.0.2")
    other.grant_lease("x", 1000)
    mine[0].release(leases[0])
    mine[4].grant_lease("x", 1000)
    world.cache.reserve(world.namespace_id, Tier.HOST, count=4)
    with pytest.raises(ResourceExhausted, match="has 4 reservations"):
        world.cache.reserve(world.namespace_id, Tier.HOST, count=1)
    for session in mine:
        session.close()
    world.store.open_session("far", remote=True, peer="10.0.0.1").grant_lease("x", 1000)


def test_no_peer_takes_all_bytes_of_buffers(make_world):
    world = make_world(buffer_bytes=4096, config=StoreConfig(buffers_bytes_max=1 << 20, peer_share=0.5))
    first = world.store.open_session("big", buffer_bytes=1 << 19, uid=7)
    with pytest.raises(ResourceExhausted, match="uid 7 has buffers"):
        world.store.open_session("big", buffer_bytes=4096, uid=7)
    world.store.open_session("other", buffer_bytes=4096, uid=8)
    first.close()
    world.store.open_session("big", buffer_bytes=1 << 19, uid=7)


def test_no_peer_takes_all_namespaces_and_names(make_world):
    world = make_world(config=StoreConfig(namespaces_max=16, peer_share=0.5))
    far = [world.store.open_session("far", remote=True, peer="10.0.0.1") for _ in range(2)]
    for number in range(7):
        far[number % 2].open_namespace(replace(SPEC, salt=b"%d" % number))
    far[0].open_namespace(replace(SPEC, salt=b"0"), name="first")
    far[0].open_namespace(replace(SPEC, salt=b"0"), name="first")
    for spec, name in ((SPEC, ""), (replace(SPEC, salt=b"0"), "second")):
        with pytest.raises(ResourceExhausted, match="has 8 namespaces"):
            far[0].open_namespace(spec, name=name)
    other = world.store.open_session("other", remote=True, peer="10.0.0.2")
    other.open_namespace(replace(SPEC, salt=b"other"), name="other")
    far[1].close()
    for number in range(3):
        far[0].open_namespace(replace(SPEC, salt=b"more %d" % number))
    far[0].close()
    assert not [peer for peer, _ in world.store._state.owners.peers if peer == "10.0.0.1"]


def test_verify_and_evict_end_with_their_caller(world):
    keys = world.chain(1, 8)
    world.put(keys)
    asked = iter([False, False, True])
    assert world.store.verify(stop=lambda: next(asked)).blocks == 3
    asked = iter([False, True])
    done = world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys, stop=lambda: next(asked))
    assert done.blocks == 1
    assert sum(bits & Tier.HOST.bit > 0 for bits in world.residency(keys)) == 7
    world.run()
    assert rights(world) == {}


def test_a_verify_with_a_rate_ends_while_it_waits(world):
    world.put(world.chain(1, 8))
    asked = []

    def stop():
        asked.append(True)
        world.clock.advance(0.05)
        return len(asked) == 4

    assert world.store.verify(bytes_per_second=1, stop=stop).blocks == 1


@pytest.mark.parametrize("how", ["expiry", "close"])
def test_many_rights_end_in_sections_that_others_can_come_between(world, monkeypatch, how):
    session = world.store.open_session("many", buffer_bytes=1 << 16)
    session.open_namespace(SPEC)
    for _ in range(2000):
        session.grant_lease("short", 1000)
    for _ in range(8):
        session.reserve(world.namespace_id, Tier.HOST, count=2)
    state, sections, locked = world.store._state, [], world.store._state.locked

    @contextmanager
    def counted():
        with locked() as book:
            before = len(state.owners.leases)
            yield book
            sections.append(before - len(state.owners.leases))

    monkeypatch.setattr(state, "locked", counted)
    if how == "close":
        session.close()
    else:
        world.clock.advance(2)
        world.store.tick()
    assert len(state.owners.leases) == 0
    assert max(sections) <= 512
    session.close()
    assert rights(world) == {}
    assert violations(world.store) == []


def test_a_session_is_left_for_the_operator_when_all_are_taken(make_world):
    world = make_world(config=StoreConfig(sessions_max=4, peer_share=1.0))
    for number in range(3):
        world.store.open_session(f"engine {number}", buffer_bytes=4096, uid=os.getuid())
    with pytest.raises(ResourceExhausted):
        world.store.open_session("one too many", buffer_bytes=4096, uid=os.getuid())
    assert world.store.open_session("kvctl", uid=os.getuid())
    with pytest.raises(ResourceExhausted):
        world.store.open_session("stranger", uid=os.getuid() + 1)
    with pytest.raises(ResourceExhausted):
        world.store.open_session("far", remote=True, peer="loopback")
