"""The lists are exact, leaves first, and each step is bounded: compared with a plain model, and counted."""

from __future__ import annotations

import random

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.types import Codec, Outcome, Reason, Target, Tier
from kvstore.store.columns.index import NONE, UNKNOWN, BlockIndex
from kvstore.store.columns.lifecycle import Copy, Event
from kvstore.store.eviction.lru import LruList
from kvstore.store.tables.book import Book
from kvstore.store.tables.namespaces import NamespaceTable
from kvstore.testing.world import SPEC

DEVICE, HOST, SSD = (tier.bit for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))


def listed(lru: LruList) -> list[int]:
    found, slot = [], lru.coldest
    while slot != NONE:
        found.append(slot)
        slot = lru.hotter_than(slot)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_list_agrees_with_a_plain_one(seed):
    chance = random.Random(seed)
    index = BlockIndex()
    lru = LruList(index, Tier.HOST)
    for number in range(40):
        index.add(bytes([number]) * 32, NONE, 0, 0)
    plain: list[int] = []
    aside: set[int] = set()
    for _ in range(2000):
        slot = chance.randrange(40)
        match chance.choice(["use", "take", "aside", "cold"]):
            case "use":
                lru.use(slot)
                plain = [s for s in plain if s != slot] + [slot]
                aside.discard(slot)
            case "take":
                lru.take(slot)
                plain = [s for s in plain if s != slot]
                aside.discard(slot)
            case "aside" if slot in plain:
                lru.set_aside(slot)
                plain.remove(slot)
                aside.add(slot)
            case "cold":
                lru.return_cold(slot)
                if slot in aside:
                    aside.remove(slot)
                    plain.insert(0, slot)
        assert listed(lru) == plain
        assert lru.aside.keys() == aside
        assert all((s in lru) == (s in plain) for s in range(40))


def test_the_coldest_leaf_goes_first_and_parents_after_their_children(make_world):
    world = make_world(host_blocks=8)
    cold, hot = world.chain(1, 4), world.chain(2, 4)
    world.put(cold)
    world.put(hot)
    order = []
    for number in range(3, 11):
        before = set(resident(world, cold + hot))
        world.put(world.chain(number, 1))
        order += before - set(resident(world, cold + hot))
    assert order[:8] == [*cold[::-1], *hot[::-1]]


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_used_leaf_keeps_its_parents_which_then_go_right_after_it(make_world, disk, with_disk):
    world = make_world(host_blocks=6, disk=disk if with_disk else None)
    old, other = world.chain(1, 3), world.chain(2, 3)
    world.put(old)
    world.put(other)
    world.run()
    # Only the leaf of the old chain is used; its parents are colder than all of the other chain.
    lease = world.cache.grant_lease("use", 1000)
    world.cache.fetch(world.namespace_id, old[2:], Target.IN_PLACE, lease_id=lease)
    world.cache.release(lease)
    order = []
    for number in range(3, 9):
        before = set(resident(world, old + other, HOST))
        world.put(world.chain(number, 1))
        world.run()
        order += before - set(resident(world, old + other, HOST))
    assert order == [*other[::-1], *old[::-1]]


def test_eviction_does_a_bounded_number_of_steps_whatever_the_chains(make_world, monkeypatch):
    world = make_world(host_blocks=400, buffer_bytes=4 << 20)
    steps = 0
    judge = type(world.store._movement.space).judge

    def counted(self, book, slot, tier):
        nonlocal steps
        steps += 1
        return judge(self, book, slot, tier)

    monkeypatch.setattr(type(world.store._movement.space), "judge", counted)
    world.put(world.chain(1, 400))
    for number in range(2, 402):
        world.put(world.chain(number, 1))
    assert world.store.status().counters["host_evicted"] == 400
    assert steps == 400


def test_a_parent_set_aside_for_pinned_children_comes_back(make_world):
    world = make_world(host_blocks=4)
    keys = world.chain(1, 3)
    world.put(keys)
    lease = world.cache.grant_lease("leaf", 10_000)
    world.cache.fetch(world.namespace_id, keys[2:], Target.IN_PLACE, lease_id=lease)
    world.put(world.chain(2, 1))
    refused = world.put(world.chain(3, 2))
    # The chain can not go: its leaf is pinned, so its parents are no leaves. Only the other block can.
    assert refused.outcomes == (Outcome.HIT, Outcome.BUSY)
    assert len(world.residency(keys)) == 3
    world.cache.release(lease)
    assert world.put(world.chain(4, 3)).outcomes == (Outcome.HIT,) * 3
    assert resident(world, keys) == [keys[0]] or resident(world, keys) == []


def test_nothing_is_freed_if_not_enough_can_be(make_world):
    world = make_world(host_blocks=4)
    keys = world.chain(1, 4)
    world.put(keys)
    lease = world.cache.grant_lease("all but the leaf", 10_000)
    world.cache.fetch(world.namespace_id, keys[:3], Target.IN_PLACE, lease_id=lease)
    with world.store._state.locked() as book:
        space = world.store._movement.space
        assert space.gather(book, Tier.HOST, 2 * 8192, demote=True) is None
        assert [v.nbytes for v in space.gather(book, Tier.HOST, 8192, demote=True)] == [8192]
    assert not world.store._movement.make_room(Tier.HOST, 2 * 8192)
    assert len(world.residency(keys)) == 4


def test_ghosts_keep_children_and_go_with_them(world):
    book = world.store._state._book
    keys = world.chain(1, 3)
    world.put(keys)
    assert world.cache.remove(world.namespace_id, keys[:1]) == (Outcome.HIT,)
    assert world.residency(keys) == ()
    assert len(book.index) == 3
    ghost = book.index.slots(0)[keys[0]]
    assert (book.index.residency[ghost], book.index.children[ghost]) == (0, 1)
    world.put(keys[:1])
    assert len(world.residency(keys)) == 3
    world.cache.remove(world.namespace_id, keys[:1])
    world.cache.remove(world.namespace_id, keys[1:])
    # The queue of writes still remembers the slots; it finds nothing to write and lets them go.
    world.run()
    assert len(book.index) == 0


def test_slots_are_used_again_without_a_trace(world):
    book = world.store._state._book
    for round_number in range(3):
        keys = world.chain(round_number, 5)
        world.put(keys)
        world.fetch(keys)
        world.clock.advance(100)
        world.run()
        world.cache.remove(world.namespace_id, keys)
    assert book.index.top <= 5
    assert len(book.index) == 0
    for tables in (book.pins, book.holds, book.io, book.refs, book.fills, book.doomed):
        assert tables == {}


def test_a_recovered_parent_that_comes_after_its_child_is_adopted():
    table = NamespaceTable(4)
    namespace, _ = table.open(SPEC, "", None)
    book = Book(table, {}, ManualClock(), (16, 16, 0))
    ghost = book.index.add(b"p" * 32, UNKNOWN, 0, 0)
    child = book.block(b"c" * 32, ghost, namespace, Codec.RAW)
    copy = Copy(Tier.SSD, 0, place=7)
    copy.advance(Event.FILL)
    book.set_ready(child, copy)
    assert book.block(b"p" * 32, NONE, namespace, Codec.RAW) == ghost
    assert book.index.parent[ghost] == NONE
    assert book.index.kids[Tier.SSD][ghost] == 1
    book.drop(child, Tier.SSD, Reason.EVICTED)
    assert len(book.index) == 0


def resident(world, keys, tiers=DEVICE | HOST | SSD):
    with world.store._state.locked() as book:
        slots = {key: book.index.slots(0).get(key, NONE) for key in keys}
        return [key for key, slot in slots.items() if slot != NONE and book.index.residency[slot] & tiers]
