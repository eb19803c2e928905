"""Many keys of one call looked up and pinned in one step of the index. Called with the lock held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.core.types import BlockKey, Outcome, Reason, Target
from kvstore.store.columns.index import NONE, Asked
from kvstore.store.moves.loading import Load
from kvstore.store.tables.book import Book
from kvstore.store.tables.places import forms_of

_WANTED: Final = {
    Target.IN_PLACE: bytes((0, 1, 2, 1) * 64),
    Target.DEVICE: bytes((0, 1, 0, 1) * 64),
    Target.HOST: bytes((0, 0, 2, 2) * 64),
    Target.BUFFER: bytes(256),
}
"""By target: number of the tier that is read, by residency bits; 0 where bytes have to move first."""


class Used(NamedTuple):
    """What a load found: slots of the blocks, in order, and the residency of each."""

    slots: list[int]
    bits: bytes


def pin_found(book: Book, load: Load, readable: int, why: Callable[[BlockKey], Reason]) -> Used:
    """Settle the keys of a load that are misses (for the reason ``why`` names) or lie where its target allows.

    These are pinned for its lease, if it has one. Positions whose bytes have to move are left in ``load.moving``.
    """
    lease, namespace = load.lease, load.namespace
    found = book.index.fetch(
        Asked(namespace.number, readable, _WANTED[load.target]),
        load.keys,
        None if lease is None else lease.pins,
        forms_of(namespace, load.layers[0]),
        book.versions,
    )
    book.tell_held(found.pinned)
    load.slots, load.moving = found.slots, found.moving
    for position in found.missing:
        load.settle(position, Outcome.MISS, why(load.keys[position]))
    load.settle_hits(found.hits, found.places)
    used = [slot for slot in found.slots if slot != NONE] if found.missing else found.slots
    return Used(used, found.bits)
