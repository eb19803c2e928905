"""Many keys of one call looked up and pinned in one step of the index. Called with the lock held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.core.types import BlockKey, Outcome, Reason, Target
from kvstore.store.columns.index import NONE
from kvstore.store.columns.steps import Asked
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


def pin_found(
    book: Book, load: Load, readable: int, why: Callable[[BlockKey], Reason], part: tuple[int, int] | None = None
) -> Used:
    """Settle the keys of a load that are misses (for the reason ``why`` names) or lie where its target allows.

    These are pinned for its lease, if it has one. Positions whose bytes have to move are added to ``load.moving``.
    ``part`` are the positions that are looked at, [begin, end); all of them without it.
    """
    lease, namespace = load.lease, load.namespace
    begin, end = part or (0, len(load.keys))
    found = book.index.fetch(
        Asked(namespace.number, readable, _WANTED[load.target]),
        load.keys if part is None else load.keys[begin:end],
        None if lease is None else lease.pins,
        forms_of(namespace, load.layers[0]),
        book.versions,
    )
    book.tell_held(found.pinned)
    if part is None:
        load.slots, load.moving = found.slots, found.moving
        hits = found.hits
    else:
        load.slots[begin:end] = found.slots
        load.moving += [begin + position for position in found.moving]
        hits = [begin + position for position in found.hits]
    for position in found.missing:
        load.settle(begin + position, Outcome.MISS, why(load.keys[begin + position]))
    load.settle_hits(hits, found.places)
    used = [slot for slot in found.slots if slot != NONE] if found.missing else found.slots
    return Used(used, found.bits)
