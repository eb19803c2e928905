"""Reading plans as rights: what one holds, and whose it is. Guarded by the store's lock where nothing else is said."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.core.types import Codec, PlanId, Tier
from kvstore.store.columns.index import NONE
from kvstore.tiers.base import HeldFile

if TYPE_CHECKING:
    from kvstore.store.tables.namespaces import Namespace
    from kvstore.store.tables.owners import Lease, Owner

KINDS = 2
"""Codecs that a namespace's stored blocks have: raw and its own."""


@dataclass(slots=True, eq=False)
class PlanRight:
    """One open plan: its lease (pins, no clock), its ring in the session's buffer, and its number in native code.

    Blocks are numbered as their keys came. It ends once, by ``Plans.end``: natively first, so that nothing writes the
    ring any more; then ring, pins and files go back.
    """

    plan_id: PlanId
    owner: Owner
    namespace: Namespace
    lease: Lease
    layers: tuple[int, int]
    ring: tuple[int, int]
    """Offset and bytes in the buffer."""
    idle_s: float
    native: int = 0
    slots: array[int] = field(default_factory=lambda: array("i"))
    """By block; NONE: a miss."""
    tiers: array[int] = field(default_factory=lambda: array("B"))
    files: list[HeldFile] = field(default_factory=list)
    """Held; ``moves.reading.Reading`` changes it, under its own lock."""
    retired: list[HeldFile] = field(default_factory=list)
    """Released, but native code may look at their versions until the plan has ended."""
    units: int = 0
    """What it counts in the bound of all plans."""
    tries: Counter[int] = field(default_factory=Counter)
    """By block: reads that failed though the disk then found nothing wrong."""
    seen: int = 0
    """Pieces that the reader had given back when that was looked at last."""
    touched: float = 0.0
    """When there was a sign of the reader last."""
    drained: bool = False
    """No read of its files is under way, and none will be."""
    ended: bool = False
    adding: threading.Lock = field(default_factory=threading.Lock)
    """Keys are added by one call at a time. Taken before the store's lock."""

    def block_count(self) -> int:
        """Blocks, misses included."""
        return len(self.slots)

    def present(self, block: int) -> bool:
        """Whether a block is no miss."""
        return 0 <= block < len(self.slots) and self.slots[block] != NONE

    def units_of(self, codec: Codec) -> tuple[int, int]:
        """Units of the plan's layers in a block under a codec."""
        return self.namespace.layout.unit_range(codec, self.layers)

    def kind_of(self, codec: Codec) -> int:
        """Number of a codec in native code."""
        return int(codec is not Codec.RAW)

    def tier(self, block: int) -> Tier:
        """Which storage a block is read from."""
        return Tier(self.tiers[block])
