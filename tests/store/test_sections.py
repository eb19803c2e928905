"""No call of many blocks keeps the lock for long: it works in sections, whose steps are counted, not timed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import KVStoreError, UnknownLease
from kvstore.core.keys import parents_of
from kvstore.core.types import Durability, Outcome, Target, Tier
from kvstore.store.tables.state import SECTION
from kvstore.store.tables.tenancy import SECTION_THINGS
from kvstore.store.verbs.get import SECTION_KEYS
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk

BLOCKS = 1024
CALLS_MAX = 6_400
"""Calls of functions in one section: about 100 for each of 64 blocks. In one go all blocks take several times that."""


@pytest.fixture
def world(make_world):
    made = make_world(host_blocks=BLOCKS + 64, disk=MemoryDisk(capacity_bytes=1 << 30), buffer_bytes=BLOCKS * 4096)
    yield made
    assert violations(made.store) == []


class Sections:
    """What was done while the lock was held, section by section."""

    def __init__(self):
        self.calls, self.unpinned = [0], [0]

    def clear(self):
        self.__init__()


@pytest.fixture
def sections(world, monkeypatch):
    """Calls of Python functions and pins given up."""
    state, found, locked = world.store._state, Sections(), world.store._state.locked

    @contextmanager
    def counted():
        with locked() as book:
            calls, pins = 0, len(book.pins)

            def count(_frame, event, _argument):
                nonlocal calls
                calls += event == "call"

            sys.setprofile(count)
            try:
                yield book
            finally:
                sys.setprofile(None)
                found.calls.append(calls)
                found.unpinned.append(pins - len(book.pins))

    monkeypatch.setattr(state, "locked", counted)
    return found


def reserved(world, keys):
    """Entries of a commit, their blocks written."""
    numbers = world.cache.reserve(world.namespace_id, Tier.HOST, count=len(keys)).reservation_ids
    return [CommitEntry(*entry) for entry in zip(numbers, keys, parents_of(keys), strict=True)]


def test_reserve_and_abort_of_many_places(world, sections):
    for whole in (False, True):
        sections.clear()
        reserved = world.cache.reserve(world.namespace_id, Tier.HOST, count=BLOCKS, whole=whole)
        assert max(sections.calls) <= CALLS_MAX
        sections.clear()
        assert world.cache.abort(reserved.reservation_ids) == BLOCKS
        assert max(sections.calls) <= CALLS_MAX
    # One more than there is room for: all are given back, in sections, too.
    sections.clear()
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, count=BLOCKS + 1, whole=True)
    assert set(reserved.outcomes) == {Outcome.BUSY}
    assert max(sections.calls) <= CALLS_MAX
    assert not world.store._state.owners.reservations


@pytest.mark.parametrize("what", ["the session ends", "others take the room"])
def test_a_reserve_that_fails_between_its_sections_leaves_nothing(world, monkeypatch, what):
    state, locked, entered = world.store._state, world.store._state.locked, []
    session = world.session("writer", buffer_bytes=BLOCKS * 4096)
    other = world.session("other", buffer_bytes=BLOCKS * 4096)
    state.config = replace(state.config, reservations_max=BLOCKS, peer_share=1.0)

    @contextmanager
    def between():
        entered.append(None)
        if len(entered) == 3:
            monkeypatch.setattr(state, "locked", locked)
            if what == "the session ends":
                session.close()
            else:
                other.reserve(world.namespace_id, Tier.HOST, count=SECTION)
        with locked() as book:
            yield book

    monkeypatch.setattr(state, "locked", between)
    with pytest.raises(KVStoreError):
        session.reserve(world.namespace_id, Tier.HOST, count=BLOCKS)
    assert len(state.owners.reservations) == (0 if what == "the session ends" else SECTION)


@pytest.fixture
def keys(world):
    return world.chain(1, BLOCKS)


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DURABLE])
def test_a_commit_of_many_blocks(world, sections, keys, durability):
    entries = reserved(world, keys)
    lease = world.cache.grant_lease("commit", 60_000)
    sections.clear()
    done = world.cache.commit(world.namespace_id, entries, lease_id=lease, durability=durability)
    assert max(sections.calls) <= CALLS_MAX
    assert done.outcomes == (Outcome.HIT,) * BLOCKS
    assert world.cache.match(world.namespace_id, keys).matched == BLOCKS
    world.cache.release(lease)


def test_remove_pin_and_the_end_of_a_lease_of_many_blocks(world, sections, keys):
    world.cache.commit(world.namespace_id, reserved(world, keys))
    lease = world.cache.grant_lease("all", 60_000)
    world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease)
    world.cache.hold(lease, world.namespace_id, keys)
    sections.clear()
    assert world.store.pin("ops", world.namespace_id, keys) == (Outcome.HIT,) * BLOCKS
    assert world.store.unpin("ops", world.namespace_id, keys) == BLOCKS
    assert world.store.pin("ops", world.namespace_id, keys) == (Outcome.HIT,) * BLOCKS
    assert world.store.unpin("ops") == BLOCKS
    assert world.cache.release(lease) == 2 * BLOCKS
    assert world.cache.remove(world.namespace_id, keys) == (Outcome.HIT,) * BLOCKS
    assert max(sections.calls) <= CALLS_MAX
    assert world.cache.match(world.namespace_id, keys).matched == 0


def test_the_release_of_a_large_lease_is_over_at_once_and_its_rest_is_called_elsewhere(world, sections, keys):
    world.cache.commit(world.namespace_id, reserved(world, keys))
    small, large = (world.cache.grant_lease(name, 60_000) for name in ("small", "large"))
    for lease, some in ((small, keys[:10]), (large, keys)):
        world.cache.fetch(world.namespace_id, some, Target.HOST, lease_id=lease)
    assert world.cache.begin_release(small) == 10
    sections.clear()
    rest = world.cache.begin_release(large)
    assert len(sections.unpinned) == 2  # with that of ``clear``
    with pytest.raises(UnknownLease):
        world.cache.renew_lease(large)
    assert rest() == BLOCKS
    assert max(sections.unpinned) <= SECTION_THINGS
    assert world.store.status().counters["copies_pinned"] == 0


def index_of(world):
    with world.store._state.locked() as book:
        return book.index


def test_fetch_and_prefetch_of_many_blocks(world, keys, monkeypatch):
    """Some in HOST, some on SSD only, some nowhere: as a fetch of few answers, a section at a time."""
    stored, new = keys[:900], keys[900:]
    world.cache.commit(world.namespace_id, reserved(world, stored), durability=Durability.DURABLE)
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=stored[800:])
    index, asked = index_of(world), []
    fetch = index.fetch
    monkeypatch.setattr(index, "fetch", lambda *given: asked.append(len(given[1])) or fetch(*given))
    lease = world.cache.grant_lease("all", 60_000)
    got = world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease)
    assert asked == [SECTION_KEYS] * (BLOCKS // SECTION_KEYS)
    assert got.outcomes == (Outcome.HIT,) * 800 + (Outcome.PENDING,) * 100 + (Outcome.MISS,) * len(new)
    world.store.run_pending()
    done = world.cache.wait_job(got.job_id, 0)
    assert done.outcomes == (Outcome.HIT,) * 900 + (Outcome.MISS,) * len(new)
    assert world.store.status().counters["copies_pinned"] == 900
    assert [place is not None for place in done.places] == [True] * 900 + [False] * len(new)
    assert world.cache.release(lease) == 900
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=stored[800:])
    moved = world.cache.prefetch(world.namespace_id, keys, Tier.HOST)
    assert moved.outcomes == got.outcomes
    world.store.run_pending()
    assert world.cache.match(world.namespace_id, keys).residency[899] & Tier.HOST.bit
    assert world.store.status().counters["blocks_held"] == 0


def test_a_fetch_whose_lease_ends_between_its_sections_holds_nothing(world, keys, monkeypatch):
    world.cache.commit(world.namespace_id, reserved(world, keys), durability=Durability.DURABLE)
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys[100:])
    index, ended = index_of(world), []
    fetch = index.fetch
    lease = world.cache.grant_lease("short", 1000)
    monkeypatch.setattr(index, "fetch", lambda *given: ended.append(world.clock.advance(2)) or fetch(*given))
    with pytest.raises(UnknownLease):
        world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease)
    assert len(ended) == 1
    world.store.tick()
    counters = world.store.status().counters
    assert (counters["copies_pinned"], counters["blocks_held"]) == (0, 0)


def test_holds_of_many_blocks_and_their_release_by_name(world, sections, keys):
    world.cache.commit(world.namespace_id, reserved(world, keys))
    lease = world.cache.grant_lease("all", 60_000)
    sections.clear()
    assert world.cache.hold(lease, world.namespace_id, keys) == (True,) * BLOCKS
    assert len(sections.calls) > BLOCKS // SECTION_THINGS
    sections.clear()
    assert world.cache.release(lease, world.namespace_id, keys) == BLOCKS
    assert len(sections.calls) > BLOCKS // SECTION_THINGS
    assert max(sections.calls) <= CALLS_MAX
    assert world.store.status().counters["blocks_held"] == 0


def test_a_hold_whose_lease_ends_between_its_sections_holds_nothing(world, keys, monkeypatch):
    world.cache.commit(world.namespace_id, reserved(world, keys))
    lease, state = world.cache.grant_lease("short", 1000), world.store._state
    locked = state.locked

    @contextmanager
    def expires_after_it():
        with locked() as book:
            yield book
        world.clock.advance(2)

    monkeypatch.setattr(state, "locked", expires_after_it)
    with pytest.raises(UnknownLease):
        world.cache.hold(lease, world.namespace_id, keys)
    monkeypatch.undo()
    world.store.tick()
    assert world.store.status().counters["blocks_held"] == 0


@pytest.mark.parametrize("how", ["the session ends", "the lease ends"])
def test_a_job_of_many_blocks_that_nobody_can_use_any_more_ends_in_sections(world, sections, keys, how):
    world.cache.commit(world.namespace_id, reserved(world, keys), durability=Durability.DURABLE)
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    session = world.session("reader")
    lease = session.grant_lease("all", 60_000)
    job = session.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease).job_id
    assert world.store.status().counters["blocks_held"] == BLOCKS
    sections.clear()
    if how == "the lease ends":
        session.release(lease)
        assert session.wait_job(job, 0).outcomes == (Outcome.MISS,) * BLOCKS
    session.close()
    assert max(sections.calls) <= CALLS_MAX
    assert world.store.status().counters["blocks_held"] == 0
    world.store.run_pending()
    assert world.store.status().counters["copies_pinned"] == 0


@pytest.mark.parametrize("how", ["expiry", "close", "release whose caller goes"])
def test_one_lease_with_many_pins_that_nobody_releases(world, sections, keys, how):
    world.cache.commit(world.namespace_id, reserved(world, keys))
    session = world.session("reader")
    lease = session.grant_lease("all", 1000)
    session.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease)
    sections.clear()
    if how == "close":
        session.close()
    elif how == "expiry":
        world.clock.advance(2)
        world.store.tick()
    else:
        assert callable(session.begin_release(lease)), "what gives back the rest, which nobody calls"
        world.store.tick()
    assert max(sections.calls) <= CALLS_MAX
    assert max(sections.unpinned) <= SECTION_THINGS
    assert world.store.status().counters["copies_pinned"] == 0


def test_a_commit_whose_parent_would_go_between_its_sections(world, keys, monkeypatch):
    """Parents of blocks that are still to be published stay: others may come between, and find them kept."""
    entries = reserved(world, keys[: 2 * SECTION])
    state, seen, locked = world.store._state, [], world.store._state.locked

    @contextmanager
    def between():
        with locked() as book:
            yield book
        if book.blocks[Tier.HOST] == SECTION and not seen:
            seen.append(None)
            seen[0] = world.cache.remove(world.namespace_id, keys[SECTION - 1 : SECTION])

    monkeypatch.setattr(state, "locked", between)
    done = world.cache.commit(world.namespace_id, entries)
    assert seen == [(Outcome.BUSY,)]
    assert done.outcomes == (Outcome.HIT,) * (2 * SECTION)
    assert world.cache.remove(world.namespace_id, keys) == (Outcome.HIT,) * (2 * SECTION) + (Outcome.MISS,) * (
        BLOCKS - 2 * SECTION
    )
