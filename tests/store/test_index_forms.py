"""Both forms of the index, the native one and the reference in Python, in lockstep: every answer and every column."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.types import ROOT_PARENT, Codec, Outcome, Reason, Target, Tier
from kvstore.kernels import native
from kvstore.store.columns import forms
from kvstore.store.columns.index import NONE, TIER_BITS, UNKNOWN, BlockIndex
from kvstore.store.columns.lifecycle import Copy, Event
from kvstore.store.columns.native import NativeIndex
from kvstore.store.columns.steps import Asked
from kvstore.store.eviction import policies
from kvstore.store.eviction.lru import LruList
from kvstore.store.recovery import _register_group
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import NamespaceTable
from kvstore.store.tables.places import forms_of
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import SPEC, World
from kvstore.tiers.base import RecoveredBlock

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native index: {native.native_status().reason}")

TIERS = (Tier.HOST, Tier.SSD)
COLUMNS = ("parent", "namespace", "residency", "codec", "depth", "children", "hits", "last_use")
TIER_COLUMNS = ("place", "kids")
WANTED = bytes((0, 0, 2, 2) * 64)


class Pair:
    """A book over each form. ``both`` does the same on each and wants the same answer."""

    def __init__(self):
        self.books, self.namespaces, self.clock = [], [], ManualClock()
        for form in ("native", "python"):
            table = NamespaceTable(8)
            self.namespaces.append([table.open(SPEC, "", None)[0]])
            self.namespaces[-1].append(table.open(replace(SPEC, model="other"), "", None)[0])
            with forms.only(form):
                self.books.append(Book(table, {}, self.clock, (1 << 16, 64, 0), {}, forms.make_index(TIERS)))
        self.pins, self.slots = [{}, {}], {}

    def both(self, step):
        answers = [step(book, spaces) for book, spaces in zip(self.books, self.namespaces, strict=True)]
        assert answers[0] == answers[1]
        return answers[0]

    def compare(self):
        one, two = (book.index for book in self.books)
        assert (len(one), one.top) == (len(two), two.top)
        assert sorted(one.blocks()) == sorted(two.blocks())
        used = [slot for slot in range(two.top) if two.key_at(slot) is not None]
        assert used == [slot for slot in range(one.top) if one.key_at(slot) is not None]
        for name in COLUMNS:
            assert [getattr(one, name)[s] for s in used] == [getattr(two, name)[s] for s in used], name
        for tier in TIERS:
            for name in TIER_COLUMNS:
                assert [getattr(one, name)[tier][s] for s in used] == [getattr(two, name)[tier][s] for s in used], name
            assert one.pinned_bytes(tier) == two.pinned_bytes(tier)
            assert self.both(lambda book, _, tier=tier: listed(book, tier))
        assert dict(one.pins) == dict(two.pins)
        assert len(one.pins) == len(two.pins)


def listed(book, tier):
    book.uses.hand_over()
    lru, found = book.policies[tier], []
    slot = lru.coldest
    while slot != NONE:
        found.append(slot)
        assert slot in lru
        slot = lru.hotter_than(slot)
    assert lru.hottest == (found[-1] if found else NONE)
    return found, list(lru.aside), lru.first_aside()


def ready(book, slot, tier, place):
    copy = Copy(tier, 0, place=place)
    copy.advance(Event.FILL)
    book.set_ready(slot, copy)


class Script:
    """Random steps on a pair: each does what a store may do at that moment, or nothing."""

    def __init__(self, seed):
        self.chance, self.pair = random.Random(seed), Pair()
        self.keys = [self.chance.randbytes(32) for _ in range(120)]
        self.held: list[list[int]] = []
        self.steps = 0

    def step(self):
        self.steps += 1
        chance, pair = self.chance, self.pair
        self.space, self.key, self.tier = chance.randrange(2), chance.choice(self.keys), chance.choice(TIERS)
        self.slot = pair.both(lambda book, spaces: book.index.find(spaces[self.space].number, self.key))
        self.index = pair.books[1].index
        self.resident = self.slot != NONE and pair.books[1].has(self.slot, self.tier)
        steps = (self.come, self.come, self.go, self.use, self.pin, self.unpin, self.set_aside)
        chance.choice((*steps, self.reconsider, self.reconsider_all, self.look, self.fetch, self.ghost, self.start))()

    def come(self):
        if self.resident:
            return
        above = self.index.find(self.pair.namespaces[1][self.space].number, self.before(self.key))
        if above == NONE or not self.index.residency[above]:
            above = NONE
        place = self.chance.randrange(1 << 20)

        def step(book, spaces):
            made = book.block(self.key, above, spaces[self.space], Codec.RAW)
            ready(book, made, self.tier, place)
            return made

        self.pair.both(step)

    def before(self, key):
        """A key that may be the parent of this one: so none is its own ancestor."""
        return self.chance.choice(self.keys[: self.keys.index(key)] or [ROOT_PARENT])

    def start(self):
        """Blocks that a tier was found to hold: parents after their children, some twice, some of another codec."""
        found = []
        for key in self.chance.choices(self.keys, k=self.chance.randrange(30)):
            parent = self.chance.choice([ROOT_PARENT, self.before(key), found[-1].key if found else ROOT_PARENT])
            if parent != ROOT_PARENT and self.keys.index(parent) >= self.keys.index(key):
                parent = ROOT_PARENT
            codec = self.chance.choice([Codec.RAW] * 9 + [Codec.INT8])
            found.append(RecoveredBlock(len(found), b"", key, parent, codec, 0))

        def step(book, spaces):
            namespace = spaces[self.space]
            _register_group(book, namespace, found, self.tier)
            dropped, book.dropped_handles = book.dropped_handles, []
            return dropped, namespace.slots, namespace.blocks, namespace.blocks_by_tier, book.blocks, book.bytes

        self.pair.both(step)

    def go(self):
        if self.resident:
            self.pair.both(lambda book, _: book.drop(self.slot, self.tier, Reason.EVICTED))

    def use(self):
        known = [slot for _, _, slot in self.index.blocks()]
        some = self.chance.sample(known, min(len(known), 5))
        self.pair.clock.advance(0.5)
        self.pair.both(lambda book, _: book.use(list(some)))

    def pin(self):
        if self.resident:
            self.held.append([copy_number(self.slot, self.tier)] * self.chance.randrange(1, 3))
            self.pair.both(lambda book, _: book.pin_all(list(self.held[-1])))

    def unpin(self):
        if self.held:
            numbers = self.held.pop(self.chance.randrange(len(self.held)))
            self.pair.both(lambda book, _: book.unpin_all(list(numbers)))

    def set_aside(self):
        def step(book, _):
            book.uses.hand_over()
            book.policies[self.tier].set_aside(self.slot)

        if self.resident and copy_number(self.slot, self.tier) not in self.pair.books[1].pins:
            self.pair.both(step)

    def reconsider(self):
        if self.slot != NONE:
            self.pair.both(lambda book, _: book.policies[self.tier].reconsider(self.slot))

    def reconsider_all(self):
        self.pair.both(lambda book, _: book.policies[self.tier].reconsider_all())

    def look(self):
        some = self.chance.choices(self.keys, k=self.chance.randrange(80))
        self.pair.both(lambda book, spaces: book.index.match(spaces[self.space].number, some, 0b010))
        self.pair.both(lambda book, spaces: [book.index.slots(spaces[self.space].number).get(key, -9) for key in some])
        self.pair.both(lambda book, _: sorted(book.index.with_prefix(some[0][:1], 3, 90)) if some else None)

    def fetch(self):
        some = self.chance.sample(self.keys, 40)
        pins = [{}, {}] if self.chance.random() < 0.7 else [None, None]

        def step(book, spaces):
            namespace, mine = spaces[self.space], pins[self.pair.books.index(book)]
            asked = Asked(namespace.number, 0b110, WANTED)
            found = book.index.fetch(asked, some, mine, forms_of(namespace, 1), book.versions)
            book.tell_held(found.pinned)
            return found._replace(pinned=[])

        self.pair.both(step)
        assert pins[0] == pins[1]
        if pins[0]:
            self.held.append(list(pins[0]))

    def ghost(self):
        """The parent of a block that was found before it, as at a start."""
        if self.slot == NONE:
            self.pair.both(lambda book, spaces: orphan(book, spaces[self.space], self.key, self.steps))


@pytest.mark.parametrize("seed", range(6))
def test_both_forms_answer_and_hold_the_same_whatever_is_done(seed):
    script = Script(seed)
    for step in range(1500):
        script.step()
        if step % 10 == 0:
            script.pair.compare()
    for numbers in script.held:
        script.pair.both(lambda book, _, numbers=numbers: book.unpin_all(list(numbers)))
    script.pair.compare()
    books = script.pair.books
    assert dict(books[0].pins) == {}
    assert books[0].events.last == books[1].events.last


def orphan(book, namespace, key, number):
    made = book.add(key, UNKNOWN, namespace, 0)
    child = book.block(number.to_bytes(32, "big"), made, namespace, Codec.RAW)
    ready(book, child, Tier.SSD, number)
    return made, child


def test_a_store_answers_the_same_over_both_forms():
    chance, worlds, leases = random.Random(11), [], []
    for form in ("native", "python"):
        with forms.only(form):
            worlds.append(World(host_blocks=24, device_blocks=6, disk=MemoryDisk()))
    assert [world.store.status().index for world in worlds] == ["native", "python"]

    def both(step):
        answers = [step(world) for world in worlds]
        assert answers[0] == answers[1]
        return answers[0]

    chains = [worlds[0].chain(seed, 6) for seed in range(14)]
    for _ in range(400):
        keys = chance.choice(chains)
        keys = keys[: chance.randrange(1, 7)]
        verb = chance.choice(["put", "put", "fetch", "fetch", "release", "match", "remove", "run", "hold", "ahead"])
        if verb == "put":
            tier = chance.choice([Tier.HOST, Tier.HOST, Tier.DEVICE])
            both(lambda world, k=keys, t=tier: world.put(k, tier=t))
        elif verb == "fetch":
            target = chance.choice([Target.IN_PLACE, Target.HOST, Target.DEVICE, Target.BUFFER])
            leases.append(both(lambda world: world.cache.grant_lease("some", 60_000)))

            def fetch(world, k=keys, t=target):
                found = world.cache.fetch(world.namespace_id, k, t, lease_id=leases[-1])
                if found.job_id:
                    world.run()
                    found = world.cache.wait_job(found.job_id, 1000)
                pairs = zip(k, found.outcomes, found.places, strict=True)
                assert all(world.read(world.cache, p, x) for x, o, p in pairs if o is Outcome.HIT)
                return found

            both(fetch)
        elif verb == "release" and leases:
            lease = leases.pop(chance.randrange(len(leases)))
            both(lambda world, x=lease: world.cache.release(x))
        elif verb == "match":
            both(lambda world, k=keys: world.cache.match(world.namespace_id, k))
        elif verb == "remove":
            both(lambda world, k=keys: world.cache.remove(world.namespace_id, k[-1:]))
        elif verb == "hold" and leases:
            both(lambda world, k=keys: world.cache.hold(leases[0], world.namespace_id, k))
        elif verb == "ahead":
            both(lambda world, k=keys: world.cache.prefetch(world.namespace_id, k, Tier.HOST).outcomes)
        both(lambda world: world.run())
        assert both(lambda world: violations(world.store)) == []
        both(lambda world: {name: n for name, n in world.store.status().counters.items() if "lock" not in name})
    for world in worlds:
        world.close()


def test_the_table_grows_a_little_with_each_block_and_finds_all_of_them():
    index = NativeIndex((Tier.SSD,))
    keys = [number.to_bytes(32, "little") for number in range(20_000)]
    for number, key in enumerate(keys):
        assert index.add(key, NONE, 0, 0) == number
        if number % 997 == 0:
            assert all(index.find(0, k) == n for n, k in enumerate(keys[: number + 1]))
    chance = random.Random(3)
    gone = set(chance.sample(range(20_000), 15_000))
    for slot in gone:
        index.delete(slot)
    assert [index.find(0, key) for key in keys] == [NONE if n in gone else n for n in range(20_000)]
    assert index.core.table_bytes() <= 20_000 * 8 * 4
    assert len(index) == 5_000


def test_what_is_wrong_is_refused_and_reads_no_other_memory():
    index = NativeIndex((Tier.HOST,))
    slot = index.add(b"k" * 32, NONE, 0, 0)
    never, no_tier, not_pinned = (slot + 1) << TIER_BITS | 2, slot << TIER_BITS | 3, slot << TIER_BITS | 2
    wrong = [(index.delete, (slot + 1,)), (index.delete, (-1,)), (index.note, ([7], 1)), (index.orphan, (9,))]
    wrong += [(index.pin_all, ([never],)), (index.pin_all, ([no_tier],)), (index.unpin_all, ([not_pinned],))]
    wrong += [(index.add, (b"x" * 32, 9, 0, 0)), (index.adopt, (slot, 9, 0)), (index.set_kind, (5, 1))]
    for method, arguments in wrong:
        with pytest.raises(IndexError):
            method(*arguments)
    with pytest.raises(ValueError, match=r"keys\[1\] is no key of 32 bytes"):
        index.match(0, [b"k" * 32, b"k" * 31], 0xFF)
    with pytest.raises(ValueError, match="32 bytes"):
        index.add(b"short", NONE, 0, 0)
    index.delete(slot)
    with pytest.raises(IndexError):
        index.delete(slot)
    view = index.residency
    del index, wrong, method
    assert view[0] == 0


def test_without_the_extension_or_the_address_space_the_reference_is_taken_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(native, "native_status", lambda: native.NativeStatus((), "it was not built"))
    found = forms.make_index(TIERS)
    assert (found.form, type(found)) == ("python", BlockIndex)
    assert "it was not built" in caplog.text
    monkeypatch.undo()

    def refused(tiers, slots_max, shared):
        raise MemoryError

    monkeypatch.setattr(native, "index", refused)
    assert forms.make_index(TIERS).form == "python"
    assert "address space" in caplog.text
    assert type(policies.lru(found, Tier.HOST)) is LruList
