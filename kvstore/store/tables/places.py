"""Where the slices of a copy lie, as callers are told."""

from __future__ import annotations

from kvstore.core.types import Area, Place, Tier
from kvstore.store.columns.index import PAGE_BITS
from kvstore.store.tables.book import Book


def place_of(book: Book, slot: int, tier: Tier, first_layer: int = 0) -> Place:
    """Place of the slices from ``first_layer`` on of a READY copy in an arena. Called with the lock held."""
    layout = book.namespace(slot).layout
    offset = book.index.offset(slot, tier)
    if tier is Tier.DEVICE:
        codec = book.device_codec(slot)
        begin = offset + layout.layer_offset(codec, first_layer)
        version = book.versions[tier][begin >> PAGE_BITS]
        return Place(Area.DEVICE, begin, layout.of_codec(codec)[1], codec, version)
    codec = book.codec(slot)
    begin = offset + layout.header_bytes + layout.layer_offset(codec, first_layer)
    return Place(Area.HOST, begin, layout.of_codec(codec)[1], codec, book.versions[tier][begin >> PAGE_BITS])
