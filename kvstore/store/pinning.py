"""Many keys of one call looked up and pinned in one pass over the index's columns. Called with the lock held.

A call of 64 descriptors has a quarter of a millisecond for everything, so that nothing here calls a function for a
key that it can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.core.types import BlockKey, Outcome, Place, Reason, Target, Tier
from kvstore.store.book import Book
from kvstore.store.index import NONE, PAGE
from kvstore.store.loading import Load
from kvstore.store.places import place_of

_TIERS: Final = (Tier.DEVICE, *Tier)

_WANTED: Final = {
    Target.IN_PLACE: (0, 1, 2, 1, 0, 1, 2, 1),
    Target.DEVICE: (0, 1, 0, 1, 0, 1, 0, 1),
    Target.HOST: (0, 0, 2, 2, 0, 0, 2, 2),
    Target.BUFFER: (0,) * 8,
}
"""By target: number of the tier that is read, by residency bits; 0 where bytes have to move first."""


_MISS: Final = -1


def pin_found(book: Book, load: Load, readable: int, why: Callable[[BlockKey], Reason]) -> list[int]:
    """Settle the keys of a load that are misses (for the reason ``why`` names) or lie where its target allows.

    These are pinned for its lease, if it has one. Positions whose bytes have to move are left in ``load.moving``.
    Returns the slots of all blocks that were found, in order.
    """
    index, keys, wanted = book.index, load.keys, _WANTED[load.target]
    slot_of, residency, namespaces, number = index.slots.get, index.residency, index.namespace, load.namespace.number
    slots = [slot_of(key, NONE) for key in keys]
    tiers = [
        wanted[residency[slot]] if slot >= 0 and residency[slot] & readable and namespaces[slot] == number else _MISS
        for slot in slots
    ]
    load.slots = slots
    if min(tiers, default=1) > 0:
        hits: Sequence[int] = range(len(keys))
        used = slots
    else:
        hits = [position for position, tier in enumerate(tiers) if tier > 0]
        load.moving += [position for position, tier in enumerate(tiers) if tier == 0]
        for position, tier in enumerate(tiers):
            if tier == _MISS:
                slots[position] = NONE
                load.settle(position, Outcome.MISS, why(keys[position]))
        used = [slot for slot in slots if slot != NONE]
    if load.lease is None:
        load.settle_hits(hits, None)
        return used
    _tell_places(book, load, hits, tiers)
    numbers = [4 * slots[position] + tiers[position] for position in hits]
    pins = load.lease.pins
    fresh = numbers if pins.isdisjoint(numbers) else [number for number in numbers if number not in pins]
    if len(set(fresh)) != len(fresh):
        # A key twice in one call is pinned once.
        fresh = list(dict.fromkeys(fresh))
    pins.update(fresh)
    book.pin_all(fresh)
    return used


def _tell_places(book: Book, load: Load, hits: Sequence[int], tiers: Sequence[int]) -> None:
    """Settle hits with their places, all those of one tier and codec together: most calls have one such kind."""
    index, slots, new = book.index, load.slots, tuple.__new__
    codecs = index.codec
    kinds = [4 * tiers[position] + codecs[slots[position]] for position in hits]
    different = set(kinds)
    for kind in different:
        group = (
            hits if len(different) == 1 else [position for position, k in zip(hits, kinds, strict=True) if k == kind]
        )
        tier, first = kind >> 2, slots[group[0]]
        area, offset, stride, codec = place_of(book, first, _TIERS[tier], load.layers[0])
        pages = index.place[tier]
        begin = offset - pages[first] * PAGE
        # As Place(...), which takes twice as long.
        places = [new(Place, (area, pages[slots[p]] * PAGE + begin, stride, codec)) for p in group]
        load.settle_hits(group, places)
