"""Where the slices of a copy lie, as callers are told."""

from __future__ import annotations

from kvstore.core.errors import InternalError
from kvstore.core.namespace import PAGE_BITS
from kvstore.core.types import Area, Codec, Place, Tier
from kvstore.store.columns.steps import KINDS, Forms
from kvstore.store.tables.book import Book
from kvstore.store.tables.namespaces import Namespace


def forms_of(namespace: Namespace, first_layer: int) -> Forms:
    """Where the slices from ``first_layer`` on lie in a copy, by tier that is addressed and by kind."""
    known = namespace.forms.get(first_layer)
    if known is None:
        known = namespace.forms[first_layer] = tuple(
            None if not tier else _form(namespace, Tier(tier), kind, first_layer)
            for tier in (0, Tier.DEVICE, Tier.HOST)
            for kind in range(KINDS)
        )
    return known


def _form(namespace: Namespace, tier: Tier, kind: int, first_layer: int) -> tuple[int, Area, int, Codec]:
    layout, bit = namespace.layout, 2 if tier is Tier.DEVICE else 1
    codec = namespace.codec if kind & bit else Codec.RAW
    header = 0 if tier is Tier.DEVICE else layout.header_bytes
    area = Area.DEVICE if tier is Tier.DEVICE else Area.HOST
    return header + layout.layer_offset(codec, first_layer), area, layout.of_codec(codec)[1], codec


def place_of(book: Book, slot: int, tier: Tier, first_layer: int = 0) -> Place:
    """Place of the slices from ``first_layer`` on of a READY copy in an arena. Called with the lock held."""
    form = forms_of(book.namespace(slot), first_layer)[tier * KINDS + book.index.codec[slot]]
    if form is None:
        raise InternalError(f"tier {tier} is not addressed")
    first, area, stride, codec = form
    begin = book.index.offset(slot, tier) + first
    return Place(area, begin, stride, codec, book.versions[tier][begin >> PAGE_BITS])
