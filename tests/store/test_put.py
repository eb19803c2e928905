"""Reserve, commit and abort: what is visible when, what is given back, what is refused."""

from __future__ import annotations

import mmap

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument, ResourceExhausted, UnknownReservation
from kvstore.core.keys import block_key, chain_keys, parents_of
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import ROOT_PARENT, Area, BlockKey, Outcome, Reason, ReservationId, Target, Tier
from kvstore.store.config import StoreConfig
from kvstore.testing.world import ON_DEVICE, SPEC

DEVICE, HOST, SSD = (tier.bit for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))


def test_a_block_is_visible_from_its_commit_on_and_not_before(world):
    keys = world.chain(1, 2)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys)
    assert reserved.outcomes == (Outcome.PENDING,) * 2
    assert all(place.area is Area.BUFFER for place in reserved.places)
    missed = world.cache.match(world.namespace_id, keys)
    assert (missed.matched, missed.reason) == (0, Reason.UNCOMMITTED)
    for key, place in zip(keys, reserved.places, strict=True):
        world.write(world.cache.memory(Area.BUFFER), place, key)
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents_of(keys), strict=True)]
    committed = world.cache.commit(world.namespace_id, entries)
    assert committed.outcomes == (Outcome.HIT,) * 2
    assert committed.existed == (False, False)
    assert world.residency(keys) == (HOST, HOST)
    assert world.fetch(keys).outcomes == (Outcome.HIT,) * 2


def test_the_bytes_are_those_of_the_commit_not_of_the_buffer_afterwards(world):
    (key,) = world.chain(1, 1)
    world.put([key])
    buffer = world.cache.memory(Area.BUFFER)
    buffer[:] = bytes(len(buffer))
    assert world.fetch([key]).outcomes == (Outcome.HIT,)


def test_committing_gives_the_buffer_back(world):
    world.put(world.chain(1, 4))
    (session,) = world.store.sessions()
    assert (session.buffer_used_bytes, session.reservations) == (0, 0)


def test_device_blocks_are_written_in_the_buffer_and_copied_when_they_are_committed(world):
    reserved = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=2)
    keys = world.chain(1, 2)
    for key, place in zip(keys, reserved.places, strict=True):
        world.write(world.cache.memory(place.area), place, key)
    lease = world.cache.grant_lease("seal", 1000)
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents_of(keys), strict=True)]
    assert [place.area for place in reserved.places] == [Area.BUFFER] * 2
    assert world.store.status().tiers[0].reserved_bytes == 2 * ON_DEVICE
    committed = world.cache.commit(world.namespace_id, entries, lease_id=lease)
    assert [place.area for place in committed.places] == [Area.DEVICE] * 2
    assert world.residency(keys) == (DEVICE, DEVICE)
    assert world.store.sessions()[0].buffer_used_bytes == 0
    assert world.store.status().tiers[0].reserved_bytes == 0


def test_nobody_can_write_a_committed_block_on_device(world):
    (key,) = world.chain(1, 1)
    reserved = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1)
    world.write(world.cache.memory(Area.BUFFER), reserved.places[0], key)
    world.cache.commit(world.namespace_id, [CommitEntry(reserved.reservation_ids[0], key, ROOT_PARENT)])
    # Neither the writer, in the place that it had, nor anyone who maps the arena.
    world.cache.memory(Area.BUFFER)[:ON_DEVICE] = b"x" * ON_DEVICE
    with pytest.raises(TypeError):
        world.store.open_session("other").memory(Area.DEVICE)[0] = 1
    device = world.store.device
    with pytest.raises(PermissionError):
        mmap.mmap(device.fd, device.mapped_bytes)
    assert world.fetch([key], Target.DEVICE).outcomes == (Outcome.HIT,)
    assert world.fetch([key], Target.HOST).outcomes == (Outcome.HIT,)


def test_a_reservation_on_device_takes_its_buffer_or_nothing(make_world):
    world = make_world(buffer_bytes=2 * ON_DEVICE, device_blocks=8)
    full = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=3)
    assert full.outcomes == (Outcome.PENDING, Outcome.PENDING, Outcome.BUSY)
    assert (full.busy.tier, full.busy.free_bytes) == (Tier.HOST, 0)
    assert world.store.status().tiers[0].reserved_bytes == 2 * ON_DEVICE
    assert world.cache.abort(full.reservation_ids[:2]) == 2
    assert world.store.status().tiers[0].used_bytes == 0
    world = make_world(device_blocks=1)
    full = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=2)
    assert (full.outcomes[1], full.busy.tier) == (Outcome.BUSY, Tier.DEVICE)
    assert world.store.sessions()[0].buffer_used_bytes == ON_DEVICE
    bare = world.store.open_session("bare")
    bare.open_namespace(SPEC)
    with pytest.raises(InvalidArgument, match="without a buffer"):
        bare.reserve(world.namespace_id, Tier.DEVICE, count=1)


def test_a_resident_key_needs_no_write(world):
    keys = world.chain(1, 2)
    world.put(keys[:1])
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys)
    assert reserved.outcomes == (Outcome.HIT, Outcome.PENDING)
    assert reserved.reservation_ids[0] == 0
    assert reserved.places[0] is None


def test_the_second_writer_of_a_key_finds_it_existing(world):
    (key,) = world.chain(1, 1)
    first = world.cache.reserve(world.namespace_id, Tier.HOST, keys=[key])
    second = world.cache.reserve(world.namespace_id, Tier.HOST, keys=[key])
    used = world.store.status().tiers[1].used_bytes
    for reserved, existed in ((first, False), (second, True)):
        world.write(world.cache.memory(Area.BUFFER), reserved.places[0], key)
        entry = CommitEntry(reserved.reservation_ids[0], key, ROOT_PARENT)
        committed = world.cache.commit(world.namespace_id, [entry])
        assert (committed.outcomes, committed.existed) == ((Outcome.HIT,), (existed,))
    assert world.store.status().tiers[1].used_bytes == used + 8192
    assert world.store.sessions()[0].buffer_used_bytes == 0


def test_a_device_copy_of_a_block_that_is_elsewhere_is_kept(world):
    (key,) = world.chain(1, 1)
    world.put([key])
    reserved = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1)
    world.write(world.cache.memory(reserved.places[0].area), reserved.places[0], key)
    lease = world.cache.grant_lease("seal", 1000)
    entry = CommitEntry(reserved.reservation_ids[0], key, ROOT_PARENT)
    committed = world.cache.commit(world.namespace_id, [entry], lease_id=lease)
    assert committed.existed == (True,)
    assert committed.places[0].area is Area.DEVICE
    assert world.residency([key]) == (DEVICE | HOST,)


def test_a_second_device_copy_is_given_back_and_the_first_is_the_place(world):
    (key,) = world.chain(1, 1)
    world.put([key], tier=Tier.DEVICE)
    lease = world.cache.grant_lease("seal", 1000)
    first = world.cache.fetch(world.namespace_id, [key], Target.DEVICE, lease_id=lease).places
    reserved = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1)
    entry = CommitEntry(reserved.reservation_ids[0], key, ROOT_PARENT)
    committed = world.cache.commit(world.namespace_id, [entry], lease_id=lease)
    assert committed.existed == (True,)
    assert committed.places == first
    assert world.store.status().tiers[0].used_bytes == ON_DEVICE
    assert world.store.status().tiers[0].reserved_bytes == 0


def test_a_child_without_its_parent_is_a_miss_and_its_reservation_is_gone(world):
    keys = world.chain(1, 3)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys[1:])
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys[1:], keys[:2], strict=True)]
    committed = world.cache.commit(world.namespace_id, entries)
    assert committed.outcomes == (Outcome.MISS,) * 2
    assert committed.reasons == (Reason.PARENT_MISSING,) * 2
    assert world.store.sessions()[0].buffer_used_bytes == 0
    assert world.store.status().tiers[1].used_bytes == 0
    with pytest.raises(UnknownReservation):
        world.cache.commit(world.namespace_id, entries[:1])


def test_a_double_commit_changes_nothing(world):
    keys = world.chain(1, 2)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys)
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents_of(keys), strict=True)]
    world.cache.commit(world.namespace_id, entries[:1])
    with pytest.raises(UnknownReservation):
        world.cache.commit(world.namespace_id, entries)
    assert world.residency(keys) == (HOST,)
    assert world.cache.commit(world.namespace_id, entries[1:]).outcomes == (Outcome.HIT,)


def test_another_session_can_not_commit_or_abort_my_reservation(world):
    other = world.session("other", buffer_bytes=1 << 16)
    (key,) = world.chain(1, 1)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=[key])
    with pytest.raises(UnknownReservation):
        other.commit(world.namespace_id, [CommitEntry(reserved.reservation_ids[0], key, ROOT_PARENT)])
    assert other.abort(reserved.reservation_ids) == 0
    assert world.cache.abort(reserved.reservation_ids) == 1


def test_abort_gives_places_back_and_counts_what_it_knew(world):
    host = world.cache.reserve(world.namespace_id, Tier.HOST, keys=world.chain(1, 2))
    device = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=2)
    unknown = (ReservationId(999_999),)
    assert world.cache.abort((*host.reservation_ids, *device.reservation_ids, *unknown)) == 4
    assert world.cache.abort(host.reservation_ids) == 0
    status = world.store.status()
    assert (status.reservations, status.tiers[0].used_bytes, status.tiers[0].reserved_bytes) == (0, 0, 0)
    assert world.cache.match(world.namespace_id, world.chain(1, 1)).reason is Reason.NEVER_STORED


def test_a_full_buffer_is_busy_with_numbers_and_keeps_what_it_gave(make_world):
    world = make_world(buffer_bytes=4096 * 2)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=world.chain(1, 4))
    assert reserved.outcomes == (Outcome.PENDING,) * 2 + (Outcome.BUSY,) * 2
    assert (reserved.busy.tier, reserved.busy.needed_bytes, reserved.busy.free_bytes) == (Tier.HOST, 1536, 0)


def test_tokens_prove_the_keys(world):
    tokens = list(range(16))
    keys = chain_keys(world.namespace_id, tokens, 8)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys)
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents_of(keys), strict=True)]
    with pytest.raises(InvalidArgument, match=r"keys\[1\]"):
        world.cache.commit(world.namespace_id, entries, token_ids=[*tokens[:-1], 99])
    with pytest.raises(InvalidArgument, match="token_ids is 15 tokens"):
        world.cache.commit(world.namespace_id, entries, token_ids=tokens[:-1])
    assert world.cache.commit(world.namespace_id, entries, token_ids=tokens).outcomes == (Outcome.HIT,) * 2
    (event,) = world.store.events_after(0)
    assert (tuple(event.token_ids), event.keys, event.parents) == (tuple(tokens), tuple(keys), tuple(parents_of(keys)))


def test_a_forked_chain_shares_its_prefix(world):
    trunk = world.chain(1, 2)
    world.put(trunk)
    left = block_key(world.namespace_id, trunk[-1], [1] * 8)
    right = block_key(world.namespace_id, trunk[-1], [2] * 8)
    world.put([left], parent=trunk[-1])
    world.put([right], parent=trunk[-1])
    assert len(world.residency([*trunk, left])) == 3
    assert len(world.residency([*trunk, right])) == 3
    assert world.store.show_block(trunk[-1]).children == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tier": Tier.SSD, "count": 1}, "tier"),
        ({"tier": Tier.HOST, "count": 0}, "count"),
        ({"tier": Tier.HOST, "count": -1}, "count"),
        ({"tier": Tier.HOST, "count": 4097}, "count"),
        ({"tier": Tier.HOST, "keys": [BlockKey(bytes(32))], "count": 1}, "count"),
        ({"tier": Tier.HOST, "keys": [BlockKey(bytes(31))]}, "keys[0]"),
        ({"tier": Tier.HOST, "keys": [BlockKey(bytes(32))] * 2}, "keys[1]"),
        ({"tier": Tier.HOST, "keys": [BlockKey(i.to_bytes(32, "big")) for i in range(4097)]}, "keys"),
    ],
)
def test_bad_reserves_change_nothing(world, change, field):
    with pytest.raises(InvalidArgument) as caught:
        world.cache.reserve(world.namespace_id, **change)
    assert caught.value.field == field
    assert world.store.status().reservations == 0


def test_bad_commits_change_nothing(world):
    keys = world.chain(1, 2)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys)
    good = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents_of(keys), strict=True)]
    bad = [
        (good[::-1], "parents[0]"),
        ([good[0], good[0]], "keys[1]"),
        ([good[0], CommitEntry(good[0].reservation_id, keys[1], keys[0])], "reservation_ids"),
        ([CommitEntry(good[0].reservation_id, keys[1], ROOT_PARENT)], "keys[0]"),
        ([CommitEntry(good[0].reservation_id, BlockKey(b"x"), ROOT_PARENT)], "keys[0]"),
        ([CommitEntry(good[0].reservation_id, keys[0], BlockKey(b"x"))], "parents[0]"),
    ]
    for entries, field in bad:
        with pytest.raises(InvalidArgument) as caught:
            world.cache.commit(world.namespace_id, entries)
        assert caught.value.field == field
    assert world.store.status().reservations == 2
    assert world.cache.commit(world.namespace_id, good).outcomes == (Outcome.HIT,) * 2


def test_a_reservation_of_another_namespace_is_refused(world):
    other = world.cache.open_namespace(NamespaceSpec(**{**_fields(SPEC), "salt": b"other"}))
    (key,) = world.chain(1, 1)
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=[key])
    with pytest.raises(InvalidArgument, match="a reservation of this namespace"):
        world.cache.commit(other.namespace_id, [CommitEntry(reserved.reservation_ids[0], key, ROOT_PARENT)])
    assert world.store.status().reservations == 1


def test_reservations_are_bounded(make_world):
    world = make_world(config=StoreConfig(reservations_max=3))
    world.cache.reserve(world.namespace_id, Tier.DEVICE, count=2)
    with pytest.raises(ResourceExhausted, match="reservations_max"):
        world.cache.reserve(world.namespace_id, Tier.DEVICE, count=2)
    assert world.store.status().reservations == 2


def _fields(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_whole_is_all_places_or_none(world):
    """What was reserved before the first refusal is given back at once, and what is resident stays a HIT."""
    world.put(world.chain(1, 1))
    (session,) = world.store.sessions()
    fits = session.buffer_bytes // (SPEC.layers * mmap.PAGESIZE)
    keys = [*world.chain(1, 1), *world.chain(2, 4 * fits)]
    some = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys)
    made = [number for number in some.reservation_ids if number]
    assert 0 < len(made) < len(keys) - 1
    world.cache.abort(made)
    none = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys, whole=True)
    assert none.outcomes == (Outcome.HIT,) + (Outcome.BUSY,) * (len(keys) - 1)
    assert not any(none.reservation_ids)
    assert not any(none.places)
    assert none.busy is not None
    (session,) = world.store.sessions()
    assert (session.buffer_used_bytes, session.reservations) == (0, 0)
    all_of_them = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys[1 : len(made) + 1], whole=True)
    assert all_of_them.outcomes == (Outcome.PENDING,) * len(made)
