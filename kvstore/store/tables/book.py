"""The book of copies: what is resident where, pinned, held, under I/O; the one writer of the index and the lists.

Every method is called with the store's lock held and does bookkeeping only. What has to happen outside the lock
(dropping disk handles) is left in ``dropped_handles``, which ``state.State`` hands to the disk after unlocking.

*Pins*, which the index counts, keep one copy where it is; *holds* keep a block from losing its
last copy; *io* marks a copy that a copy or the disk reads from; *refs* keep a slot's number from being given to another
block while someone outside the lock remembers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.namespace import PAGE_BYTES
from kvstore.core.types import TIERS_MAX, BlockKey, BlockName, Codec, Reason, Tier
from kvstore.store.columns.forms import make_index
from kvstore.store.columns.index import NONE, TIER_BITS, TIER_MASK, UNKNOWN, BlockIndex
from kvstore.store.columns.lifecycle import Copy, CopyState, Event
from kvstore.store.columns.occupants import Occupants
from kvstore.store.eviction.policies import build_all
from kvstore.store.eviction.uses import Uses
from kvstore.store.tables.history import Counters, EventLog, News, Tombstones
from kvstore.store.tables.namespaces import Namespace, NamespaceTable
from kvstore.tiers.base import Arena, DiskHandle
from kvstore.tiers.versions import NO_VERSIONS, Versions

_CAUSES = {Reason.EVICTED: "evicted", Reason.REMOVED: "removed", Reason.QUARANTINED: "quarantined"}

_DROPPED: Final = {
    (tier, cause): f"{tier.name.lower()}_{_CAUSES.get(cause, 'dropped')}" for tier in Tier for cause in Reason
}
"""Counters of copies that went. Looked up, since an enum's name costs as much as the rest of a drop."""


class Book:
    """Copies of all blocks. See the module's head for words."""

    def __init__(
        self,
        namespaces: NamespaceTable,
        arenas: dict[Tier, Arena],
        clock: Clock,
        limits: tuple[int, int, int],
        evictions: Mapping[Tier, str] = MappingProxyType({}),
        index: BlockIndex | None = None,
    ) -> None:
        self.index = make_index((*arenas, Tier.SSD)) if index is None else index
        self.tiers = self.index.tiers
        """Hot to cold."""
        self.policies = build_all(evictions, self.index)
        told = [self.policies[tier] for tier in self.tiers if tier not in self.index.listed]
        self.uses = Uses(self.index, told, clock.now())
        self.occupants = {tier: Occupants(arena) for tier, arena in arenas.items()}
        self.namespaces = namespaces
        self.arenas = arenas
        found = {int(tier): arena.versions for tier, arena in arenas.items()}
        self.versions: list[Versions] = [found.get(number, NO_VERSIONS) for number in range(TIERS_MAX + 1)]
        """Of the pages of each tier's arena, by tier."""
        self.events = EventLog(limits[0], limits[2])
        self.news = News(self.events)
        self.tombstones = Tombstones(limits[1])
        self.counters = Counters()
        self.blocks = [0] * (TIERS_MAX + 1)
        self.bytes = [0] * (TIERS_MAX + 1)
        self.raw_bytes = [0] * (TIERS_MAX + 1)
        self.pins: Mapping[int, int] = self.index.pins
        """How often each copy is pinned, by its number."""
        self.holds: dict[int, int] = {}
        self.io: dict[int, int] = {}
        self.refs: dict[int, int] = {}
        self.fills: dict[int, Copy] = {}
        self.doomed: dict[int, list[Copy]] = {}
        self.dropped_handles: list[tuple[Tier, DiskHandle, BlockName]] = []
        self._clock = clock

    # -- what is where -------------------------------------------------------------------------------------------

    def namespace(self, slot: int) -> Namespace:
        """Namespace of a slot."""
        return self.namespaces.entries[self.index.namespace[slot]]

    def name(self, slot: int) -> BlockName:
        """What the slot's block is: its namespace and its key."""
        return self.namespace(slot).namespace_id, self.index.key_of(slot)

    def codec(self, slot: int) -> Codec:
        """Codec of the slot's copies below DEVICE (or that they would get)."""
        return self.namespace(slot).codec if self.index.codec[slot] & 1 else Codec.RAW

    def device_codec(self, slot: int) -> Codec:
        """Codec of the slot's copy on DEVICE."""
        return self.namespace(slot).codec if self.index.codec[slot] & 2 else Codec.RAW

    def set_codecs(self, slot: int, codec: Codec, device_codec: Codec) -> None:
        """Say how the slot's copies are encoded; only of tiers where it has no READY copy may that change."""
        self.index.set_kind(slot, self.namespace(slot).kind_of(codec, device_codec))

    def nbytes(self, slot: int, tier: Tier) -> int:
        """Bytes of the slot's copy in a tier."""
        index = self.index
        return self.namespaces.entries[index.namespace[slot]].sizes[tier][index.codec[slot]]

    def has(self, slot: int, tier: Tier) -> bool:
        """Whether the tier holds a READY copy."""
        return bool(self.index.residency[slot] & tier.bit)

    def resident(self, key: BlockKey, namespace: Namespace) -> int:
        """Slot of a block with a READY copy in this namespace, or NONE."""
        slot = self.index.find(namespace.number, key)
        return slot if slot != NONE and self.index.residency[slot] else NONE

    def find(self, name: BlockName) -> int:
        """Slot of a block (or of its ghost) of any namespace, or NONE."""
        namespace = self.namespaces.find(name[0])
        return NONE if namespace is None else self.index.find(namespace.number, name[1])

    # -- blocks come ---------------------------------------------------------------------------------------------

    def block(self, key: BlockKey, parent: int, namespace: Namespace, codec: Codec | None = None) -> int:
        """Slot of a key that is about to get its first copy: a new one, or its ghost. ``parent`` is a slot or NONE."""
        index = self.index
        depth = index.depth[parent] + 1 if parent >= 0 else 0
        slot = index.find(namespace.number, key)
        if slot == NONE:
            slot = self.add(key, parent, namespace, depth)
        elif index.parent[slot] == UNKNOWN and parent != UNKNOWN:
            index.adopt(slot, parent, depth)
        if not index.residency[slot]:
            self.set_codecs(slot, namespace.codec_at(depth) if codec is None else codec, Codec.RAW)
            self.tombstones.forget((namespace.namespace_id, key))
        return slot

    def add(self, key: BlockKey, parent: int, namespace: Namespace, depth: int) -> int:
        """A new slot without copies; ``parent`` is a slot, NONE or UNKNOWN."""
        if not namespace.slots:
            # Numbers of namespaces are used again.
            self.index.know(namespace.number, namespace.sizes)
        slot = self.index.add(key, parent, namespace.number, depth)
        namespace.slots += 1
        return slot

    def set_ready(self, slot: int, copy: Copy) -> None:
        """A copy became READY: it is visible, listed at the hot end, and told."""
        copy.advance(Event.SEAL)
        index, tier = self.index, copy.tier
        namespace = self.namespace(slot)
        if not index.residency[slot]:
            namespace.blocks += 1
        index.place[tier][slot] = copy.place // PAGE_BYTES if tier in self.arenas else copy.place
        index.residency[slot] |= 1 << (tier - 1)
        parent = index.parent[slot]
        if parent >= 0:
            index.kids[tier][parent] += 1
        self.account(namespace, tier, index.codec[slot], 1)
        self.uses.hand_over()
        if tier in self.occupants:
            self.occupants[tier].put(index.place[tier][slot], copy.nbytes, slot)
        self.policies[tier].inserted(slot)
        if slot << TIER_BITS | tier in self.pins:
            self.policies[tier].held(slot)
        self.reconsider(slot)
        if namespace.share is not None:
            namespace.share.arrived(self.policies[tier].reconsider, tier)
        self.news.stored(tier, namespace, index.key_of(slot), index.parent_key(slot))

    def use(self, slots: list[int]) -> None:
        """Note a use of blocks given parents first; parents end up hotter than their children."""
        self.uses.note(slots, self._clock.now())

    # -- blocks go -----------------------------------------------------------------------------------------------

    def drop(self, slot: int, tier: Tier, cause: Reason) -> None:
        """Drop a READY copy. Its bytes are free at once, or when the I/O and the pins on it have ended."""
        index, number, place = self.index, copy_number(slot, tier), self.index.place[tier][slot]
        copy = Copy(
            tier, self.nbytes(slot, tier), CopyState.READY, place * PAGE_BYTES if tier in self.arenas else place
        )
        copy.advance(Event.DOOM if self._in_use(number) else Event.DROP)
        index.residency[slot] &= ~tier.bit & 0xFF
        self.policies[tier].removed(slot)
        if tier in self.occupants:
            self.occupants[tier].clear(place, copy.nbytes)
        namespace = self.namespace(slot)
        self.account(namespace, tier, index.codec[slot], -1)
        namespace.evicted += cause is Reason.EVICTED
        self.counters[_DROPPED[tier, cause]] += 1
        if copy.state is CopyState.DOOMED:
            self.doomed.setdefault(number, []).append(copy)
        else:
            self.give_back(copy, slot)
        parent = index.parent[slot]
        if parent >= 0:
            index.kids[tier][parent] -= 1
            if index.kids[tier][parent] == 0:
                self.policies[tier].reconsider(parent)
        key = index.key_of(slot)
        self.news.removed(tier, namespace, key, cause)
        if not index.residency[slot]:
            namespace.blocks -= 1
            self.tombstones.add((namespace.namespace_id, key), cause, self._clock.now())
            self._forget(slot)

    def drop_everywhere(self, slot: int, cause: Reason) -> None:
        """Drop all copies, and what is being filled as it lands."""
        for tier in self.tiers:
            fill = self.fills.pop(copy_number(slot, tier), None)
            if fill is not None:
                fill.advance(Event.DOOM)
        self.ref(slot)
        for tier in self.tiers:
            if self.has(slot, tier):
                self.drop(slot, tier, cause)
        self.unref(slot)

    def give_back(self, copy: Copy, slot: int) -> None:
        """Free the bytes of a copy of this slot's block that nothing uses any more."""
        arena = self.arenas.get(copy.tier)
        if arena is None:
            self.dropped_handles.append((copy.tier, DiskHandle(copy.place), self.name(slot)))
        else:
            arena.free(copy.place, copy.nbytes)

    # -- who keeps what ------------------------------------------------------------------------------------------

    def pin(self, slot: int, tier: Tier) -> None:
        """Keep a READY copy where it is."""
        self.pin_all([copy_number(slot, tier)])

    def pin_all(self, numbers: list[int]) -> None:
        """``pin`` for many copy numbers."""
        self.tell_held(self.index.pin_all(numbers))

    def tell_held(self, numbers: list[int]) -> None:
        """Tell the policies of copies that the index has pinned and was not asked to keep the list of."""
        for number in numbers:
            self.policies[number & TIER_MASK].held(number >> TIER_BITS)

    def pinned_bytes(self, tier: Tier) -> int:
        """Bytes of the tier's pinned copies."""
        return self.index.pinned_bytes(tier)

    def unpin(self, number: int) -> None:
        """Undo one ``pin`` of a copy number. At the last one the copy is droppable again, as just used."""
        self.unpin_all([number])

    def unpin_all(self, numbers: list[int]) -> None:
        """``unpin`` for many copy numbers, in their order."""
        self.uses.hand_over()
        released, gone = self.index.unpin_all(numbers)
        for number in released:
            self.policies[number & TIER_MASK].released(number >> TIER_BITS)
        if self.doomed:
            left = set(gone)
            gone = [number for number in numbers if number in self.doomed or number in left]
        # Of all others nothing waits for the pin, and a slot with a copy is not forgotten.
        for number in gone:
            self._drain(number)

    def hold(self, slot: int) -> None:
        """Keep a block from losing its last copy."""
        self.holds[slot] = self.holds.get(slot, 0) + 1

    def unhold(self, slot: int) -> None:
        """Undo one ``hold``."""
        if _decrement(self.holds, slot):
            self.reconsider(slot)
            self._forget(slot)

    def ref(self, slot: int) -> None:
        """Keep the slot's number from being reused."""
        self.refs[slot] = self.refs.get(slot, 0) + 1

    def unref(self, slot: int) -> None:
        """Undo one ``ref``."""
        if _decrement(self.refs, slot):
            self._forget(slot)

    def io_begin(self, slot: int, tier: Tier) -> None:
        """Something outside the lock starts to read a READY copy."""
        number = copy_number(slot, tier)
        self.io[number] = self.io.get(number, 0) + 1
        self.ref(slot)

    def io_end(self, slot: int, tier: Tier) -> None:
        """The reading has ended."""
        number = copy_number(slot, tier)
        if _decrement(self.io, number):
            self.policies[tier].reconsider(slot)
            self._drain(number)
        self.unref(slot)

    def fill_begin(self, slot: int, copy: Copy) -> None:
        """A copy is on its way to ``copy.tier``; nobody else fills it meanwhile."""
        copy.advance(Event.FILL)
        self.fills[copy_number(slot, copy.tier)] = copy
        self.ref(slot)

    def fill_end(self, slot: int, copy: Copy, *, well: bool) -> bool:
        """The copy has landed (``well``) or not; True if it is READY now. A block removed meanwhile stays removed."""
        number = copy_number(slot, copy.tier)
        if copy.state is CopyState.DOOMED:
            copy.advance(Event.DRAIN)
        else:
            del self.fills[number]
            if well:
                self.set_ready(slot, copy)
            else:
                copy.advance(Event.FAIL)
        if copy.state is CopyState.ABSENT and copy.place != NONE:
            self.give_back(copy, slot)
        self.unref(slot)
        return copy.state is CopyState.READY

    def reconsider(self, slot: int) -> None:
        """A reason to set the block aside may have gone: bring its copies back to the cold ends."""
        bits = self.index.residency[slot]
        for tier in self.tiers:
            if bits >> (tier - 1) & 1:
                self.policies[tier].reconsider(slot)

    # -- inside --------------------------------------------------------------------------------------------------

    def _in_use(self, number: int) -> bool:
        return number in self.io or number in self.pins

    def _drain(self, number: int) -> None:
        if self._in_use(number):
            return
        for copy in self.doomed.pop(number, ()):
            copy.advance(Event.DRAIN)
            self.give_back(copy, number >> TIER_BITS)
        self._forget(number >> TIER_BITS)

    def _forget(self, slot: int) -> None:
        """Delete the slot, and then ghosts above it, if nothing needs them.

        A slot without copies or children no longer counts as its parent's child, even while something remembers it.
        """
        index = self.index
        while slot >= 0 and not (index.key_at(slot) is None or index.residency[slot]):
            parent = index.parent[slot]
            if index.children[slot]:
                # A ghost with children. What is above it is of use to it only while that is a block.
                if parent < 0 or index.residency[parent]:
                    return
                index.orphan(slot)
                slot = parent
                continue
            if not self._remembered(slot):
                namespace = self.namespace(slot)
                namespace.slots -= 1
                index.delete(slot)
                self.namespaces.rest(namespace)
            elif parent >= 0:
                index.orphan(slot)
            if parent >= 0:
                self.reconsider(parent)
            slot = parent

    def _remembered(self, slot: int) -> bool:
        if slot in self.refs or slot in self.holds:
            return True
        return any(
            number in self.doomed or number in self.pins for number in [slot << TIER_BITS | t for t in self.tiers]
        )

    def account(self, namespace: Namespace, tier: Tier, kind: int, change: int) -> None:
        """Count copies that came (or, below 0, went)."""
        nbytes = change * namespace.sizes[tier][kind]
        namespace.blocks_by_tier[tier] += change
        if tier is Tier.SSD and namespace.blocks_by_tier[tier] == 0:
            # The disk may forget a namespace of which it holds nothing: it is told again before the next block.
            namespace.on_disk = False
        self.blocks[tier] += change
        self.bytes[tier] += nbytes
        raw = change * namespace.sizes[tier][Codec.RAW]
        self.raw_bytes[tier] += raw
        namespace.saved_bytes += raw - nbytes
        if namespace.share is not None:
            namespace.share.bytes[tier] += nbytes


def copy_number(slot: int, tier: Tier) -> int:
    """One number for a copy: the key of the sparse tables."""
    return slot << TIER_BITS | tier


def _decrement(counts: dict[int, int], key: int) -> bool:
    """Take one off; True when that was the last."""
    left = counts[key] - 1
    if left:
        counts[key] = left
        return False
    del counts[key]
    return True
