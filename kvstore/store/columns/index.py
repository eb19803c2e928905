"""The index of blocks as columns: a slot number a block, an array a field, a dict from key to slot a namespace.

A block is (namespace, key): the same key in two namespaces is two blocks, which know nothing of each other.

A slot lives while its block has a copy, while something is under way for it, or while it has children. A slot
without any copy is a *ghost*: the missing parent of blocks that are resident (their parent was removed, failed its
checksum, or was not found at start). A ghost is never matched, and is filled again when its key is committed.

Everything here is guarded by the store's lock; nothing here takes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from kvstore.core.types import TIERS_MAX, BlockKey, Tier

NONE: Final = -1
"""No slot: the parent of a root, the end of a list."""

UNKNOWN: Final = -2
"""Parent of a ghost of which nothing but its key is known."""

UNLISTED: Final = -3
"""In the links of a block that is on no list of the tier."""

PAGE_BITS: Final = 12
PAGE: Final = 1 << PAGE_BITS
DEPTH_MAX: Final = 0xFFFF
HITS_MAX: Final = 0xFFFF
_CHUNK: Final = 4096


class BlockIndex:
    """Columns by slot. Readers may index them; only ``residency.Book`` and the lists write them.

    Columns of a tier that is not among ``tiers`` stay empty: 16 bytes a block that a store without DEVICE saves.
    """

    def __init__(self, tiers: Iterable[Tier] = tuple(Tier)) -> None:
        self._tiers = tuple(tiers)
        self._spaces: list[dict[BlockKey, int]] = []
        self.keys: list[BlockKey | None] = []
        self.parent = array("i")
        self.namespace = array("I")
        self.residency = array("B")
        """Tier bits of READY copies."""
        self.codec = array("B")
        """Codecs of the copies below DEVICE and of the one there, made one number by ``Namespace.kind_of``."""
        self.depth = array("H")
        """Blocks before this one in its chain, at most 65,535."""
        self.children = array("i")
        self.hits = array("H")
        self.last_use = array("I")
        """Hundredths of a second since the store's start."""
        self.place = [array("I" if number <= Tier.HOST else "i") for number in range(TIERS_MAX + 1)]
        """Page number in the arena; the handle in storage. Lists by tier begin with an unused entry."""
        self.kids = _columns()
        """Children with a READY copy in the tier."""
        self.colder = _columns()
        self.hotter = _columns()
        """Links of the tier's LRU list (``lru.py``)."""
        self._free: list[int] = []
        self._fresh = 0

    def __len__(self) -> int:
        return self._fresh - len(self._free)

    def slots(self, namespace: int) -> dict[BlockKey, int]:
        """Slots of one namespace by key, ghosts included. For looking up: only ``add`` and ``delete`` change it."""
        while namespace >= len(self._spaces):
            self._spaces.append({})
        return self._spaces[namespace]

    def find(self, namespace: int, key: BlockKey) -> int:
        """Slot of a block (or of its ghost), or NONE."""
        return self.slots(namespace).get(key, NONE)

    @property
    def top(self) -> int:
        """Slots below this number were used at some time."""
        return self._fresh

    def add(self, key: BlockKey, parent: int, namespace: int, depth: int) -> int:
        """Make a slot without copies for a key that has none; ``parent`` is a slot, NONE or UNKNOWN."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._fresh
            if slot == len(self.parent):
                self._grow()
            self._fresh += 1
        self.slots(namespace)[key] = slot
        self.keys[slot] = key
        self.parent[slot] = parent
        self.namespace[slot] = namespace
        self.depth[slot] = depth if depth < DEPTH_MAX else DEPTH_MAX
        if parent >= 0:
            self.children[parent] += 1
        return slot

    def adopt(self, slot: int, parent: int, depth: int) -> None:
        """Give a ghost of unknown parent its parent."""
        self.parent[slot] = parent
        self.depth[slot] = depth if depth < DEPTH_MAX else DEPTH_MAX
        if parent >= 0:
            self.children[parent] += 1

    def orphan(self, slot: int) -> None:
        """Take the slot off its parent: it keeps its number only."""
        self.children[self.parent[slot]] -= 1
        self.parent[slot] = UNKNOWN

    def delete(self, slot: int) -> None:
        """Forget a slot that has no copies and no children, and is on no list."""
        key = self.keys[slot]
        if key is not None:
            del self._spaces[self.namespace[slot]][key]
        self.keys[slot] = None
        parent = self.parent[slot]
        if parent >= 0:
            self.children[parent] -= 1
        self.codec[slot] = 0
        self.hits[slot] = 0
        self._free.append(slot)

    def key_of(self, slot: int) -> BlockKey:
        """Key of a slot in use. KeyError for one that is not."""
        key = self.keys[slot]
        if key is None:
            raise KeyError(slot)
        return key

    def parent_key(self, slot: int) -> BlockKey:
        """Key of the slot's parent; zeros for a root (and for a ghost whose parent is unknown)."""
        parent = self.parent[slot]
        return self.key_of(parent) if parent >= 0 else BlockKey(bytes(32))

    def offset(self, slot: int, tier: Tier) -> int:
        """Byte offset of the slot's copy in an arena."""
        return self.place[tier][slot] * PAGE

    def _grow(self) -> None:
        self.keys.extend([None] * _CHUNK)
        for column in (
            self.parent, self.namespace, self.residency, self.codec, self.depth, self.children, self.hits,
            self.last_use, *(self.place[tier] for tier in self._tiers), *(self.kids[tier] for tier in self._tiers),
        ):  # fmt: skip
            column.frombytes(bytes(_CHUNK * column.itemsize))
        unlisted = array("i", [UNLISTED]) * _CHUNK
        for tier in self._tiers:
            self.colder[tier].extend(unlisted)
            self.hotter[tier].extend(unlisted)


def _columns() -> list[array[int]]:
    return [array("i") for _ in range(TIERS_MAX + 1)]


def closes_circle(index: BlockIndex, slot: int, parent: int) -> bool:
    """Whether a block that is about to come hangs above ``parent`` already, and so can not have it as its parent.

    ``slot`` is that of its ghost, or NONE. Keys that are made of tokens never do; the keys of a client need not be.
    """
    # Only a ghost whose parent is not known yet is given one. It is the top of what hangs under it.
    if slot == NONE or index.parent[slot] != UNKNOWN or not index.children[slot]:
        return False
    while parent >= 0 and parent != slot:
        parent = index.parent[parent]
    return parent == slot
