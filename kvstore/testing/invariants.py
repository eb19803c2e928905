"""What must hold of a store's tables at any moment: a list of what does not, for tests to compare with nothing."""

from __future__ import annotations

from collections import Counter

from kvstore.core.namespace import PAGE_BYTES
from kvstore.core.types import TIERS_MAX, Area, BlockKey, Tier
from kvstore.kernels import native
from kvstore.store.columns.index import NONE
from kvstore.store.eviction.lru import LruList
from kvstore.store.store import Store
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.state import State


def violations(store: Store) -> list[str]:
    """One sentence for each rule that is broken now. Takes the store's lock."""
    state = store._state
    with state.locked() as book:
        at_rest = not (state.owners.jobs or book.fills or any(store._get.queued))
        left = [f"{dict(table)} is left of work that has ended" for table in (book.io, book.refs) if at_rest and table]
        tables = [*_counts(book), *_lists(book), *_totals(state, book), *_owners(state, book)]
        return [*left, *tables, *_mapped(state, book)]


def _mapped(state: State, book: Book) -> list[str]:
    """Who maps the index finds of each namespace that somebody opened what lies where it can be read."""
    if book.index.fd < 0:
        return []
    mapped, readable = (
        native.mapped_index(book.index.fd),
        state.readable if state._serving and not state.recording.on else 0,
    )
    opened = {n.number: n for owner in state.owners.sessions.values() for n in owner.namespaces.values()}
    wrong = []
    for number, key, slot in _blocks(book):
        if (namespace := opened.get(number)) is None:
            continue
        found, bits = mapped.match(number, namespace.namespace_id, [key], -1), book.index.residency[slot] & readable
        if found != ((bits,) if bits else ()):
            wrong.append(f"a reader of the index finds {found!r} of slot {slot}, whose copies are {bits:#b}")
    return wrong


def _counts(book: Book) -> list[str]:
    """Parents know how many children they have, and how many of these in each tier."""
    index = book.index
    children: Counter[int] = Counter()
    kids = [Counter[int]() for _ in range(TIERS_MAX + 1)]
    wrong = []
    for number, key, slot in _blocks(book):
        if index.key_at(slot) != key or index.namespace[slot] != number:
            wrong.append(f"slot {slot} does not know its key or its namespace")
        parent = index.parent[slot]
        if parent >= 0:
            if index.namespace[parent] != number:
                wrong.append(f"the parent of slot {slot} is in another namespace")
            children[parent] += 1
            for tier in book.tiers:
                kids[tier][parent] += book.has(slot, tier)
        if not index.residency[slot] and not index.children[slot] and not book._remembered(slot):
            wrong.append(f"ghost {slot} is kept by nothing")
    for _, _, slot in _blocks(book):
        if index.children[slot] != children[slot]:
            wrong.append(f"slot {slot} has {children[slot]} children and counts {index.children[slot]}")
        for tier in book.tiers:
            if index.kids[tier][slot] != kids[tier][slot]:
                wrong.append(
                    f"slot {slot} has {kids[tier][slot]} children in {tier.name}, not {index.kids[tier][slot]}"
                )
    return wrong


def _blocks(book: Book) -> list[tuple[int, BlockKey, int]]:
    """Namespace number, key and slot of every block and ghost."""
    return book.index.blocks()


def _lists(book: Book) -> list[str]:
    """Every READY copy is listed, set aside or pinned, and in one of these only; nothing else is."""
    wrong = []
    for tier in book.tiers:
        book.uses.hand_over()
        lru = book.policies[tier]
        if not isinstance(lru, LruList):
            continue
        listed, slot, colder = set(), lru.coldest, NONE
        while slot != NONE:
            if book.index.colder[tier][slot] != colder:
                wrong.append(f"{tier.name}: links of {slot} do not meet")
            listed.add(slot)
            colder, slot = slot, lru.hotter_than(slot)
        for _, _, slot in _blocks(book):
            places = (slot in listed) + (slot in lru.aside) + (copy_number(slot, tier) in book.pins)
            if book.has(slot, tier) and places != 1:
                wrong.append(f"{tier.name}: copy of {slot} is in {places} places")
            if not book.has(slot, tier) and (slot in listed or slot in lru.aside):
                wrong.append(f"{tier.name}: {slot} is listed without a copy")
        if (listed | lru.aside.keys()) - {slot for _, _, slot in _blocks(book)}:
            wrong.append(f"{tier.name}: slots that are free are listed")
    return wrong


def _totals(state: State, book: Book) -> list[str]:
    """Bytes and blocks add up, and every byte of an arena that is handed out has an owner."""
    wrong = []
    slots = [slot for _, _, slot in _blocks(book)]
    for tier in book.tiers:
        here = [slot for slot in slots if book.has(slot, tier)]
        sizes = sum(book.nbytes(slot, tier) for slot in here)
        if (book.blocks[tier], book.bytes[tier]) != (len(here), sizes):
            wrong.append(
                f"{tier.name} counts {book.blocks[tier]} blocks, {book.bytes[tier]} bytes; has {len(here)}, {sizes}"
            )
        if tier not in state.arenas:
            continue
        others = [copy.nbytes for copies in book.doomed.values() for copy in copies if copy.tier is tier]
        others += [copy.nbytes for copy in book.fills.values() if copy.tier is tier and copy.place != NONE]
        reserved = state.reserved_bytes if tier is Tier.DEVICE else 0
        if state.arenas[tier].used_bytes != sizes + sum(others) + reserved:
            wrong.append(
                f"{tier.name} has {state.arenas[tier].used_bytes} bytes out; owned are {sizes + sum(others) + reserved}"
            )
    for namespace in state.namespaces:
        if namespace.slots != len(book.index.slots(namespace.number)):
            wrong.append(f"namespace {namespace.number} counts {namespace.slots} slots")
        mine = [slot for slot in slots if book.namespace(slot) is namespace and book.index.residency[slot]]
        if namespace.blocks != len(mine):
            wrong.append(f"namespace {namespace.number} counts {namespace.blocks} blocks and has {len(mine)}")
    return wrong


def _owners(state: State, book: Book) -> list[str]:
    """Pins, holds and buffers are those of leases, reservations, jobs and operators, and of nobody else."""
    wrong = []
    owners = state.owners
    leases = [*owners.leases.values(), *owners.ending]
    pins = Counter(number for lease in leases for number in lease.pins)
    if book.pins != pins:
        wrong.append(f"pins are {dict(book.pins)}; leases have {dict(pins)}")
    if sum(r.on_device.nbytes for r in owners.reservations.values() if r.on_device) != state.reserved_bytes:
        wrong.append(f"{state.reserved_bytes} bytes are reserved, not those of the reservations")
    for session in owners.sessions.values():
        held = [owners.reservations[r] for r in session.reservations]
        ranges = [r.copy.nbytes for r in held if r.area is Area.BUFFER]
        for lease_id in session.leases:
            ranges += [n for some in owners.leases[lease_id].buffers.values() for _, n in some]
        used = session.buffer.used_bytes if session.buffer is not None else 0
        if session.buffer_io == 0 and used != sum(-(-n // PAGE_BYTES) * PAGE_BYTES for n in ranges):
            wrong.append(f"buffer of {session.name} has {used} bytes out for ranges {ranges}")
    if not owners.jobs:
        holds = Counter(slot for lease in leases for slot in lease.holds)
        holds.update(s for by in owners.operator_pins.values() for slots in by.values() for s in slots)
        if book.holds != holds:
            wrong.append(f"holds are {dict(book.holds)}; leases and operators have {dict(holds)}")
    return wrong
