"""The index of blocks as columns: a slot number a block, an array a field, a dict from key to slot a namespace.

This is the form in plain Python: what the index means, what the native one (``native.py``) is tested against, and what
a machine without the C++ extension runs. ``forms.py`` chooses.

A block is (namespace, key): the same key in two namespaces is two blocks, which know nothing of each other.

A slot lives while its block has a copy, while something is under way for it, or while it has children. A slot
without any copy is a *ghost*: the missing parent of blocks that are resident (their parent was removed, failed its
checksum, or was not found at start). A ghost is never matched, and is filled again when its key is committed.

A copy's number is ``slot << TIER_BITS | tier``. *Pins* keep one copy where it is: counts by copy number.

Everything here is guarded by the store's lock; nothing here takes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

from kvstore.core.namespace import PAGE_BITS, PAGE_BYTES
from kvstore.core.types import ROOT_PARENT, TIERS_MAX, BlockKey, NamespaceId, Place, Tier
from kvstore.store.columns.steps import KINDS, Asked, Entered, Forms, Found
from kvstore.tiers.versions import Versions

NONE: Final = -1
"""No slot: the parent of a root, the end of a list."""

UNKNOWN: Final = -2
"""Parent of a ghost of which nothing but its key is known."""

UNLISTED: Final = -3
"""In the links of a block that is on no list of the tier."""

DEPTH_MAX: Final = 0xFFFF
HITS_MAX: Final = 0xFFFF
TIER_BITS: Final = 4
TIER_MASK: Final = (1 << TIER_BITS) - 1
_CHUNK: Final = 4096

Column: TypeAlias = "array[int] | memoryview[int]"


class BlockIndex:
    """Columns by slot. Readers may index them; only ``book.Book`` and the lists write them.

    Columns of a tier that is not among ``tiers`` stay empty: 16 bytes a block that a store without DEVICE saves.
    """

    form: ClassVar[str] = "python"
    fd: int = -1
    """Memory from which other processes match, or -1: see ``NativeIndex``."""
    listed: frozenset[Tier] = frozenset()
    """Tiers whose LRU list is kept in the index itself: their policies need not be told of uses and pins."""

    def __init__(self, tiers: Iterable[Tier] = tuple(Tier)) -> None:
        self.tiers = tuple(tiers)
        self._spaces: list[dict[BlockKey, int]] = []
        self._keys: list[BlockKey | None] = []
        self._sizes: list[Sequence[Sequence[int]]] = []
        self._pinned_bytes = [0] * (TIERS_MAX + 1)
        self._pins: dict[int, int] = {}
        self.parent: Column = array("i")
        self.namespace: Column = array("I")
        self.residency: Column = array("B")
        """Tier bits of READY copies."""
        self.codec: Column = array("B")
        """Codecs of the copies below DEVICE and of the one there, made one number by ``Namespace.kind_of``."""
        self.depth: Column = array("H")
        """Blocks before this one in its chain, at most 65,535."""
        self.children: Column = array("i")
        self.hits: Column = array("H")
        self.last_use: Column = array("I")
        """Hundredths of a second since the store's start."""
        self.place: list[Column] = [array("I" if number <= Tier.HOST else "i") for number in range(TIERS_MAX + 1)]
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

    @property
    def pins(self) -> Mapping[int, int]:
        """How often each pinned copy is pinned, by copy number."""
        return self._pins

    def slots(self, namespace: int) -> Mapping[BlockKey, int]:
        """Slots of one namespace by key, ghosts included. For looking up: only ``add`` and ``delete`` change it."""
        return self._space(namespace)

    def _space(self, namespace: int) -> dict[BlockKey, int]:
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
        self._space(namespace)[key] = slot
        self._keys[slot] = key
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
        key = self._keys[slot]
        if key is not None:
            del self._spaces[self.namespace[slot]][key]
        self._keys[slot] = None
        parent = self.parent[slot]
        if parent >= 0:
            self.children[parent] -= 1
        self.codec[slot] = 0
        self.hits[slot] = 0
        self._free.append(slot)

    def key_at(self, slot: int) -> BlockKey | None:
        """Key of a slot in use, None for one that is free."""
        return self._keys[slot] if 0 <= slot < self._fresh else None

    def key_of(self, slot: int) -> BlockKey:
        """Key of a slot in use. KeyError for one that is not."""
        key = self.key_at(slot)
        if key is None:
            raise KeyError(slot)
        return key

    def parent_key(self, slot: int) -> BlockKey:
        """Key of the slot's parent; zeros for a root (and for a ghost whose parent is unknown)."""
        parent = self.parent[slot]
        return self.key_of(parent) if parent >= 0 else BlockKey(bytes(32))

    def offset(self, slot: int, tier: Tier) -> int:
        """Byte offset of the slot's copy in an arena."""
        return self.place[tier][slot] * PAGE_BYTES

    def blocks(self, namespace: int = -1) -> list[tuple[int, BlockKey, int]]:
        """Namespace, key and slot of every block and ghost, or of those of one namespace."""
        chosen = range(len(self._spaces)) if namespace < 0 else (namespace,)
        return [(number, key, slot) for number in chosen for key, slot in self._space(number).items()]

    def with_prefix(self, prefix: bytes, begin: int, end: int) -> list[int]:
        """Slots from ``begin`` up to ``end`` whose keys begin so."""
        some = enumerate(self._keys[begin : min(end, self._fresh)], begin)
        return [slot for slot, key in some if key is not None and key.startswith(prefix)]

    # -- steps of calls that have many keys ----------------------------------------------------------------------

    def match(self, namespace: int, keys: Sequence[BlockKey], readable: int) -> bytes:
        """Residency of the longest run of blocks, from the first key on, that lie where they can be read."""
        slot_of, residency, found = self._space(namespace).get, self.residency, bytearray()
        for key in keys:
            slot = slot_of(key, NONE)
            bits = residency[slot] & readable if slot >= 0 else 0
            if not bits:
                break
            found.append(bits)
        return bytes(found)

    def fetch(
        self,
        asked: Asked,
        keys: Sequence[BlockKey],
        pins: dict[int, None] | None,
        forms: Forms,
        versions: Sequence[Versions],
    ) -> Found:
        """Look keys up, and pin those that lie where they are wanted.

        ``pins`` are the copy numbers that the lease has pinned, which get more; None: nothing is pinned or told a
        place. ``versions`` are those of the pages of each tier's arena, by tier.
        """
        namespace, readable, wanted = asked
        slot_of, residency = self._space(namespace).get, self.residency
        found = Found([], [], [], [], [], b"", [])
        bits = bytearray()
        for position, key in enumerate(keys):
            slot = slot_of(key, NONE)
            if slot == NONE or not residency[slot] & readable:
                found.slots.append(NONE)
                found.missing.append(position)
                continue
            found.slots.append(slot)
            bits.append(residency[slot])
            tier = wanted[residency[slot]]
            (found.hits if tier else found.moving).append(position)
            form = forms[tier * KINDS + self.codec[slot]]
            if pins is None or form is None:
                continue
            first, area, stride, codec = form
            begin = self.place[tier][slot] * PAGE_BYTES + first
            found.places.append(Place(area, begin, stride, codec, versions[tier][begin >> PAGE_BITS]))
            number = slot << TIER_BITS | tier
            if number not in pins:
                pins[number] = None
                found.pinned.append(number)
        return found._replace(bits=bytes(bits), pinned=self.pin_all(found.pinned))

    def enter(
        self, namespace: int, tier: Tier, names: tuple[list[BlockKey], list[BlockKey]], handles: list[int], kinds: bytes
    ) -> Entered:
        """Enter blocks that a storage tier was found to hold, in order: ``names`` are keys and their parents, ``kinds``
        their codecs. Of two copies of one block the later is refused, and one that would be of another kind.

        The slots are for the policy of a tier that is not ``listed``; where it is, each went to the hot end.
        """
        slots, residency, bit = self._space(namespace), self.residency, tier.bit
        before, fresh, done = len(self), 0, Entered([], [], 0, 0, [0] * KINDS)
        for position, (key, parent_key, handle, kind) in enumerate(zip(*names, handles, kinds, strict=True)):
            slot = slots.get(key, NONE)
            if slot != NONE and (residency[slot] & bit or (residency[slot] and kind != self.codec[slot])):
                done.refused.append(position)
                continue
            parent = NONE if parent_key == ROOT_PARENT else slots.get(parent_key, UNKNOWN)
            if parent == UNKNOWN:
                parent = self.add(parent_key, UNKNOWN, namespace, 0)
                # Which may be the block itself.
                slot = slots.get(key, NONE)
            depth = self.depth[parent] + 1 if parent >= 0 else 0
            if slot == NONE:
                slot = self.add(key, parent, namespace, depth)
            elif self.parent[slot] == UNKNOWN:
                self.adopt(slot, parent, depth)
            self.codec[slot] = kind
            self.place[tier][slot] = handle
            fresh += not residency[slot]
            residency[slot] |= bit
            if self.parent[slot] >= 0:
                self.kids[tier][self.parent[slot]] += 1
            done.kinds[kind] += 1
            done.slots.append(slot)
        return done._replace(added=len(self) - before, fresh=fresh)

    def note(self, slots: list[int], ticks: int) -> None:
        """Blocks, given parents first, are used now: one hit more, and where the index keeps lists, the hot ends."""
        for slot in slots:
            self.last_use[slot] = ticks
            if self.hits[slot] < HITS_MAX:
                self.hits[slot] += 1

    def know(self, namespace: int, sizes: Sequence[Sequence[int]]) -> None:
        """Bytes of a block of a namespace, by tier and kind: to be told before its first slot."""
        while namespace >= len(self._sizes):
            self._sizes.append(())
        self._sizes[namespace] = sizes

    def name(self, namespace: int, namespace_id: NamespaceId) -> None:
        """Tell those who map the index which namespace has this number from now on."""

    def set_readable(self, bits: int) -> None:
        """Tell those who map the index which tiers' blocks they may answer for: bits of ``residency``."""

    def set_kind(self, slot: int, kind: int) -> None:
        """Say how the block's copies are encoded. A pin of one that is DOOMED counts as what the next one has."""
        sizes = self._sizes_of(slot)
        for tier in self.tiers:
            if slot << TIER_BITS | tier in self._pins:
                self._pinned_bytes[tier] += sizes[tier][kind] - sizes[tier][self.codec[slot]]
        self.codec[slot] = kind

    def pinned_bytes(self, tier: int) -> int:
        """Bytes of the tier's pinned copies."""
        return self._pinned_bytes[tier]

    def pin_all(self, numbers: list[int]) -> list[int]:
        """Pin copies once more each; those that were not pinned before, of tiers that are not ``listed``."""
        fresh = []
        for number in numbers:
            if number in self._pins:
                self._pins[number] += 1
                continue
            self._pins[number] = 1
            fresh.append(number)
            slot, tier = number >> TIER_BITS, number & TIER_MASK
            self._pinned_bytes[tier] += self._sizes_of(slot)[tier][self.codec[slot]]
        return fresh

    def unpin_all(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Undo one pin of each copy, in their order. Those that are not pinned any more: READY ones of tiers that are
        not ``listed`` (where they go to the hot end), then those that are not READY."""
        released: list[int] = []
        gone: list[int] = []
        for number in numbers:
            if self._pins[number] > 1:
                self._pins[number] -= 1
                continue
            del self._pins[number]
            slot, tier = number >> TIER_BITS, number & TIER_MASK
            self._pinned_bytes[tier] -= self._sizes_of(slot)[tier][self.codec[slot]]
            (released if self.residency[slot] >> (tier - 1) & 1 else gone).append(number)
        return released, gone

    def _sizes_of(self, slot: int) -> Sequence[Sequence[int]]:
        namespace = self.namespace[slot]
        return (self._sizes[namespace] if namespace < len(self._sizes) else ()) or _NO_SIZES

    def _grow(self) -> None:
        self._keys.extend([None] * _CHUNK)
        tiers = [columns[tier] for tier in self.tiers for columns in (self.place, self.kids)]
        plain = (self.parent, self.namespace, self.residency, self.codec, self.depth, self.children, self.hits)
        for column in (*plain, self.last_use, *tiers):
            _extend(column, array(_array(column).typecode, bytes(_CHUNK * column.itemsize)))
        for tier in self.tiers:
            _extend(self.colder[tier], array("i", [UNLISTED]) * _CHUNK)
            _extend(self.hotter[tier], array("i", [UNLISTED]) * _CHUNK)


_NO_SIZES: Final = ((0,) * KINDS,) * (TIERS_MAX + 1)


def _columns() -> list[Column]:
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


def _array(column: Column) -> array[int]:
    """A column of this form, which can grow."""
    if not isinstance(column, array):
        raise TypeError("a column of the index in Python is an array")
    return column


def _extend(column: Column, more: array[int]) -> None:
    _array(column).extend(more)
