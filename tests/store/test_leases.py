"""Leases and sessions: owned, named, timed; their end frees everything."""

from __future__ import annotations

import mmap
import os

import pytest

from kvstore.core.errors import InvalidArgument, ResourceExhausted, Unauthenticated, Unavailable, UnknownLease
from kvstore.core.types import Area, Outcome, ReservationId, Target, Tier
from kvstore.store.config import StoreConfig

HIT, MISS, PENDING, BUSY = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.BUSY


def pinned(world, keys, lease):
    found = world.cache.fetch(world.namespace_id, keys, Target.IN_PLACE, lease_id=lease)
    assert found.outcomes == (HIT,) * len(keys)


def test_a_lease_ends_when_its_time_is_up(world):
    keys = world.chain(1, 2)
    world.put(keys)
    lease = world.cache.grant_lease("short", 1000)
    pinned(world, keys, lease)
    world.clock.advance(0.9)
    world.store.tick()
    assert world.store.leases()[0].seconds_left == pytest.approx(0.1)
    world.clock.advance(0.2)
    with pytest.raises(UnknownLease):
        world.cache.renew_lease(lease)
    assert world.store.leases() == ()
    assert world.store.status().counters["leases_expired"] == 1
    assert world.cache.remove(world.namespace_id, keys) == (HIT, HIT)


def test_the_ticker_ends_leases_that_nobody_asks_for(world):
    keys = world.chain(1, 1)
    world.put(keys)
    pinned(world, keys, world.cache.grant_lease("short", 1000))
    world.clock.advance(2)
    world.store.tick()
    assert world.store.status().counters["copies_pinned"] == 0


def test_renewing_sets_the_time_left_to_the_ttl(world):
    lease = world.cache.grant_lease("long", 1000)
    for _ in range(5):
        world.clock.advance(0.9)
        world.store.tick()
        world.cache.renew_lease(lease)
    assert world.store.leases()[0].seconds_left == pytest.approx(1.0)
    world.clock.advance(1.1)
    world.store.tick()
    assert world.store.leases() == ()


def test_pins_of_two_leases_end_apart(world):
    keys = world.chain(1, 1)
    world.put(keys)
    first, second = world.cache.grant_lease("a", 1000), world.cache.grant_lease("b", 1000)
    pinned(world, keys, first)
    pinned(world, keys, second)
    assert world.store.show_block(keys[0]).pins == 2
    assert world.cache.release(first) == 1
    assert world.cache.remove(world.namespace_id, keys) == (BUSY,)
    assert world.cache.release(second) == 1
    assert world.cache.remove(world.namespace_id, keys) == (HIT,)


def test_releasing_keys_keeps_the_lease_and_the_rest(world):
    keys = world.chain(1, 3)
    world.put(keys)
    lease = world.cache.grant_lease("x", 1000)
    pinned(world, keys, lease)
    world.cache.hold(lease, world.namespace_id, keys[:1])
    assert world.cache.release(lease, world.namespace_id, [keys[0], *world.chain(9, 1)]) == 2
    assert world.cache.remove(world.namespace_id, keys) == (HIT, BUSY, BUSY)
    assert world.cache.release(lease) == 2
    with pytest.raises(UnknownLease):
        world.cache.release(lease)


def test_a_held_block_moves_but_is_never_dropped(make_world, disk):
    world = make_world(host_blocks=4, disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    lease = world.cache.grant_lease("hold", 60_000)
    assert world.cache.hold(lease, world.namespace_id, [*keys, *world.chain(9, 1)]) == (True, True, False)
    world.put(world.chain(2, 4))
    assert world.residency(keys) == (Tier.SSD.bit,) * 2
    assert world.store.evict(Tier.SSD, namespace_id=world.namespace_id, keys=keys).outcomes == (BUSY, BUSY)
    world.store.evict(Tier.SSD, nbytes=1 << 30)
    assert world.residency(keys) == (Tier.SSD.bit,) * 2
    world.cache.release(lease)
    assert world.store.evict(Tier.SSD, namespace_id=world.namespace_id, keys=keys).outcomes == (HIT, HIT)
    assert world.residency(keys) == ()


def test_a_held_block_without_a_disk_stays_in_host(make_world):
    world = make_world(host_blocks=2)
    keys = world.chain(1, 1)
    world.put(keys)
    lease = world.cache.grant_lease("hold", 60_000)
    world.cache.hold(lease, world.namespace_id, keys)
    assert world.put(world.chain(2, 2)).outcomes == (HIT, BUSY)
    assert len(world.residency(keys)) == 1
    world.cache.release(lease)
    assert world.put(world.chain(3, 2)).outcomes == (HIT, HIT)


def test_another_session_can_not_use_my_lease(world):
    keys = world.chain(1, 1)
    world.put(keys)
    lease = world.cache.grant_lease("mine", 1000)
    other = world.session("other")
    for call in (
        lambda: other.fetch(world.namespace_id, keys, Target.IN_PLACE, lease_id=lease),
        lambda: other.hold(lease, world.namespace_id, keys),
        lambda: other.renew_lease(lease),
        lambda: other.release(lease),
    ):
        with pytest.raises(UnknownLease):
            call()
    assert world.store.leases()[0].lease_id == lease


def test_the_end_of_a_session_frees_all_that_it_owned(world):
    keys = world.chain(1, 3)
    world.put(keys)
    other = world.session("doomed", buffer_bytes=1 << 16)
    lease = other.grant_lease("x", 60_000)
    other.fetch(world.namespace_id, keys, Target.IN_PLACE, lease_id=lease)
    other.hold(lease, world.namespace_id, keys)
    other.reserve(world.namespace_id, Tier.DEVICE, count=3)
    other.reserve(world.namespace_id, Tier.HOST, keys=world.chain(2, 3))
    started = other.fetch(world.namespace_id, keys, Target.BUFFER, lease_id=lease)
    assert started.outcomes == (PENDING,) * 3
    other.close()
    other.close()
    world.run()
    status = world.store.status()
    assert (status.sessions, status.leases, status.reservations, status.jobs) == (1, 0, 0, 0)
    assert (status.counters["copies_pinned"], status.counters["blocks_held"]) == (0, 0)
    assert status.tiers[0].used_bytes == 0
    assert world.cache.match(world.namespace_id, world.chain(2, 1)).reason.name == "NEVER_STORED"
    assert world.cache.remove(world.namespace_id, keys) == (HIT,) * 3
    with pytest.raises(Unauthenticated):
        other.match(world.namespace_id, keys)


def test_a_buffer_under_io_outlives_its_session_until_the_io_ends(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    world.run()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    session = world.session("doomed", buffer_bytes=1 << 16)
    owner = world.store._state.owners.sessions[session.session_id]
    buffer = owner.buffer
    lease = session.grant_lease("x", 60_000)
    session.fetch(world.namespace_id, keys, Target.BUFFER, lease_id=lease)
    open_during_io = []

    def die_now():
        session.close()
        open_during_io.append(owner.buffer is buffer and buffer.used_bytes == 2 * 4096)

    disk.before_read = die_now
    world.run()
    assert open_during_io == [True]
    assert owner.buffer is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(session.buffer_fd)


def test_the_buffer_is_shared_and_of_fixed_size(world):
    session = world.session("shared", buffer_bytes=1 << 16)
    with mmap.mmap(session.buffer_fd, session.buffer_bytes) as client:
        client[100:105] = b"hello"
        assert session.memory(Area.BUFFER)[100:105] == b"hello"
    with pytest.raises(PermissionError):
        os.ftruncate(session.buffer_fd, 1 << 12)


def test_memory_is_read_only_where_it_has_to_be(make_world):
    world = make_world(device_blocks=0)
    host = world.cache.memory(Area.HOST)
    with pytest.raises(TypeError):
        host[0] = 1
    with pytest.raises(Unavailable):
        world.cache.memory(Area.DEVICE)
    with pytest.raises(Unavailable):
        world.store.open_session("bare").memory(Area.BUFFER)


def test_bounds_of_sessions_and_leases(make_world):
    world = make_world(config=StoreConfig(sessions_max=2, leases_max=2))
    world.store.open_session("second")
    with pytest.raises(ResourceExhausted, match="sessions_max"):
        world.store.open_session("third", buffer_bytes=1 << 16)
    world.cache.grant_lease("a", 1000)
    world.cache.grant_lease("b", 1000)
    with pytest.raises(ResourceExhausted, match="leases_max"):
        world.cache.grant_lease("c", 1000)
    world.clock.advance(2)
    world.cache.grant_lease("c", 1000)


@pytest.mark.parametrize(
    ("name", "ttl_ms", "field"),
    [("x", 0, "ttl_ms"), ("x", -1, "ttl_ms"), ("n" * 257, 1000, "name")],
)
def test_bad_leases(world, name, ttl_ms, field):
    with pytest.raises(InvalidArgument) as caught:
        world.cache.grant_lease(name, ttl_ms)
    assert caught.value.field == field


def test_bad_sessions_and_releases(world):
    with pytest.raises(InvalidArgument, match="buffer_bytes"):
        world.store.open_session("x", buffer_bytes=100)
    with pytest.raises(InvalidArgument, match="buffer_bytes"):
        world.store.open_session("x", buffer_bytes=-4096)
    lease = world.cache.grant_lease("x", 1000)
    with pytest.raises(InvalidArgument, match="namespace_id"):
        world.cache.release(lease, None, world.chain(1, 1))
    other = world.store.open_session("x")
    other.close()
    other.close()
    with pytest.raises(Unauthenticated):
        other.abort([ReservationId(1)])


def test_operators_pin_by_name(world):
    keys = world.chain(1, 3)
    world.put(keys)
    assert world.store.pin("ops", world.namespace_id, [*keys[:2], *world.chain(9, 1)]) == (HIT, HIT, MISS)
    assert world.store.pin("ops", world.namespace_id, keys[:2]) == (HIT, HIT)
    assert [(x.name, x.owner, x.holds) for x in world.store.leases()] == [("ops", "operator", 2)]
    assert world.cache.remove(world.namespace_id, keys) == (BUSY, BUSY, HIT)
    assert world.store.unpin("ops", world.namespace_id, keys[:1]) == 1
    assert world.store.unpin("nobody") == 0
    assert world.store.unpin("ops") == 1
    assert world.store.leases() == ()
    assert world.cache.remove(world.namespace_id, keys[:2]) == (HIT, HIT)
    with pytest.raises(InvalidArgument, match="name"):
        world.store.pin("", world.namespace_id, keys)


def test_a_lease_is_granted_for_the_longest_time_at_most(make_world):
    world = make_world(config=StoreConfig(lease_ttl_ms_max=2000))
    lease = world.cache.grant_lease("asks for more", 60_000)
    assert world.cache.renew_lease(lease) == 2000
    world.clock.advance(2.1)
    with pytest.raises(UnknownLease):
        world.cache.renew_lease(lease)


def test_pins_of_the_daemon_have_no_clock_and_end_with_their_owner(world):
    keys = world.chain(1, 2)
    world.put(keys)
    with world.cache.pins("read stream") as lease:
        pinned(world, keys, lease)
        world.clock.advance(1e6)
        world.store.tick()
        assert world.cache.renew_lease(lease) == 0
        assert [(report.name, report.pins) for report in world.store.leases()] == [("read stream", 2)]
        assert world.store.status().counters["lease_deadlines"] == 0
        assert world.cache.remove(world.namespace_id, keys) == (BUSY, BUSY)
    assert world.store.leases() == ()
    with world.cache.pins("read stream") as lease:
        pinned(world, keys, lease)
        world.cache.close()
        assert world.store.leases() == ()
    assert world.store.status().counters["copies_pinned"] == 0


def test_held_tells_whether_a_place_was_handed_out_again(world):
    keys = world.chain(1, 2)
    world.put(keys)
    place = world.fetch(keys).places[0]
    assert world.cache.held(place)
    world.cache.release(world.store.leases()[0].lease_id)
    assert world.cache.held(place)
    world.cache.remove(world.namespace_id, keys)
    assert not world.cache.held(place)
    world.cache.close()
    with pytest.raises(Unauthenticated):
        world.cache.held(place)
