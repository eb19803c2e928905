"""Many keys of one call looked up and pinned in one pass over the index's columns. Called with the lock held.

A call of 64 descriptors has a quarter of a millisecond for everything, so that nothing here calls a function for a
key that it can do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.core.types import Area, BlockKey, Codec, Outcome, Place, Reason, Target, Tier
from kvstore.store.columns.index import NONE, PAGE, PAGE_BITS
from kvstore.store.moves.loading import Load
from kvstore.store.tables.book import TIER_BITS, Book
from kvstore.store.tables.places import place_of

_TIERS: Final = (Tier.DEVICE, *Tier)

_WANTED: Final = {
    Target.IN_PLACE: (0, 1, 2, 1) * 64,
    Target.DEVICE: (0, 1, 0, 1) * 64,
    Target.HOST: (0, 0, 2, 2) * 64,
    Target.BUFFER: (0,) * 256,
}
"""By target: number of the tier that is read, by residency bits; 0 where bytes have to move first."""


def pin_found(book: Book, load: Load, readable: int, why: Callable[[BlockKey], Reason]) -> list[int]:
    """Settle the keys of a load that are misses (for the reason ``why`` names) or lie where its target allows.

    These are pinned for its lease, if it has one. Positions whose bytes have to move are left in ``load.moving``.
    Returns the slots of all blocks that were found, in order.
    """
    index, lease = book.index, load.lease
    slots, residency, codecs = index.slots(load.namespace.number).get, index.residency, index.codec
    wanted, found, columns = _WANTED[load.target], load.slots, index.place
    versions = book.versions
    pins = dict[int, None]() if lease is None else lease.pins
    begins: dict[int, tuple[int, Area, int, Codec]] = {}
    """By tier and codec: where slices begin in a block, then area, stride and codec of its place."""
    used: list[int] = []
    fresh: list[int] = []
    hits: list[int] = []
    places: list[Place] = []
    new = tuple.__new__
    for position, key in enumerate(load.keys):
        slot = slots(key, NONE)
        if slot == NONE or not residency[slot] & readable:
            load.settle(position, Outcome.MISS, why(key))
            continue
        found[position] = slot
        used.append(slot)
        tier = wanted[residency[slot]]
        if not tier:
            load.moving.append(position)
            continue
        hits.append(position)
        if lease is None:
            continue
        number = slot << TIER_BITS | tier
        if number not in pins:
            pins[number] = None
            fresh.append(number)
        kind, offset = 4 * tier + codecs[slot], columns[tier][slot] * PAGE
        if kind not in begins:
            area, first, stride, codec, _ = place_of(book, slot, _TIERS[tier], load.layers[0])
            begins[kind] = first - offset, area, stride, codec
        first, area, stride, codec = begins[kind]
        begin = first + offset
        # As Place(...), which takes twice as long.
        places.append(new(Place, (area, begin, stride, codec, versions[tier][begin >> PAGE_BITS])))
    load.settle_hits(hits, places)
    book.pin_all(fresh)
    return used
