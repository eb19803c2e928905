"""Standing places: reserved again by their own commit, until abort or the session's end."""

from __future__ import annotations

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument, UnknownReservation
from kvstore.core.keys import parents_of
from kvstore.core.types import Area, Outcome, Reason, Tier
from kvstore.store.verbs.commit import Commit
from kvstore.testing.invariants import violations


def stand(world, count):
    return world.cache.reserve(world.namespace_id, Tier.HOST, count=count, standing=True)


def commit(world, reserved, keys, parents=None):
    for key, place in zip(keys, reserved.places, strict=False):
        world.write(world.cache.memory(Area.BUFFER), place, key)
    rows = zip(reserved.reservation_ids, keys, parents or parents_of(keys), strict=False)
    return world.cache.commit(world.namespace_id, [CommitEntry(*row) for row in rows])


def test_the_same_places_take_one_batch_after_another(world):
    reserved = stand(world, 2)
    used = world.store.sessions()[0].buffer_used_bytes
    chains = [world.chain(seed, 2) for seed in (1, 2, 3)]
    for keys in chains:
        assert commit(world, reserved, keys).outcomes == (Outcome.HIT,) * 2
        session = world.store.sessions()[0]
        assert (session.buffer_used_bytes, session.reservations) == (used, 2)
        assert violations(world.store) == []
    for keys in chains:
        assert world.fetch(keys).outcomes == (Outcome.HIT,) * 2
    assert world.cache.abort(reserved.reservation_ids) == 2
    assert world.store.sessions()[0].buffer_used_bytes == 0
    with pytest.raises(UnknownReservation):
        commit(world, reserved, chains[0])


def test_a_block_that_is_refused_leaves_its_place_standing(world):
    reserved = stand(world, 1)
    first, second = world.chain(1, 2)
    assert commit(world, reserved, [second], [first]).reasons == (Reason.PARENT_MISSING,)
    assert commit(world, reserved, [first]).outcomes == (Outcome.HIT,)
    assert commit(world, reserved, [first]).existed == (True,)
    assert commit(world, reserved, [second], [first]).outcomes == (Outcome.HIT,)
    assert world.fetch([first, second]).outcomes == (Outcome.HIT,) * 2


def test_they_end_with_their_session(world, monkeypatch):
    other = world.session("other", buffer_bytes=1 << 16)
    reserved = other.reserve(world.namespace_id, Tier.HOST, count=1, standing=True)
    (key,) = world.chain(1, 1)
    copy = Commit.copy

    def end_meanwhile(self):
        copy(self)
        other.close()

    monkeypatch.setattr(Commit, "copy", end_meanwhile)
    other.commit(world.namespace_id, [CommitEntry(reserved.reservation_ids[0], key, bytes(32))])
    assert len(world.store.sessions()) == 1
    assert world.store._state.owners.reservations == {}
    assert violations(world.store) == []


@pytest.mark.parametrize(("tier", "by_keys"), [(Tier.DEVICE, False), (Tier.HOST, True)])
def test_only_places_of_the_buffer_by_count_can_stand(world, tier, by_keys):
    what = {"keys": world.chain(1, 1)} if by_keys else {"count": 1}
    with pytest.raises(InvalidArgument) as caught:
        world.cache.reserve(world.namespace_id, tier, standing=True, **what)
    assert caught.value.field == "standing"
    assert world.store.sessions()[0].reservations == 0
