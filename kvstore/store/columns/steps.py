"""What the steps of the index that have many keys take and give."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from kvstore.core.types import Area, Codec, Place

KINDS: Final = 4
"""What a block's codecs, made one number by ``Namespace.kind_of``, are below."""

Forms: TypeAlias = tuple[tuple[int, Area, int, Codec] | None, ...]
"""By ``tier * KINDS + kind``: what is added to a copy's offset for its place, then area, stride and codec of that."""


class Asked(NamedTuple):
    """What a fetch wants, beside its keys."""

    namespace: int
    readable: int
    """Residency bits that can be read now."""
    wanted: bytes
    """By residency bits: number of the tier that is read; 0 where bytes have to move first."""


class Found(NamedTuple):
    """What a fetch found: slots by position (NONE for a miss), and positions by what is to be done."""

    slots: list[int]
    missing: list[int]
    moving: list[int]
    hits: list[int]
    places: list[Place]
    """Of the hits; none without a lease."""
    bits: bytes
    """Residency of all that was found, in order."""
    pinned: list[int]
    """Numbers of copies that were not pinned before, whose policies have to be told."""


class Entered(NamedTuple):
    """What came of blocks that a start found."""

    refused: list[int]
    """Positions of those that did not come in."""
    slots: list[int]
    """Of all others, in order; empty where the index keeps the tier's list."""
    added: int
    """Slots that there were not before, ghosts included."""
    fresh: int
    """Blocks that were on no tier before."""
    kinds: list[int]
    """How many came, by kind."""
