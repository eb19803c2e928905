"""Blocks go because someone asked: remove, evict, and the operator's pins that forbid it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.core.errors import InvalidArgument
from kvstore.core.stop import Stop, never
from kvstore.core.types import BlockKey, NamespaceId, Outcome, Reason, Tier
from kvstore.store.columns.index import NONE
from kvstore.store.moves.move import Movement
from kvstore.store.moves.threads import PIECE_BLOCKS
from kvstore.store.report import EvictReport, ForgetReport
from kvstore.store.tables import validate
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.owners import Owner
from kvstore.store.tables.state import SECTION, parts
from kvstore.store.verbs.explain import reasons_to_stay


class Removal:
    """The verbs that drop blocks, and operators' pins."""

    def __init__(self, movement: Movement) -> None:
        self._movement = movement
        self._state = movement.state

    def remove(self, owner: Owner, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache.remove``. Children of a removed block stay, unreachable from the root, until they are evicted."""
        validate.check_keys(keys)
        state, depth = self._state, dict[BlockKey, int]()
        namespace = owner.namespace(namespace_id)
        for part in parts(keys):
            with state.locked() as book:
                found = [(key, book.resident(key, namespace)) for key in part]
                depth.update((key, book.index.depth[slot]) for key, slot in found if slot != NONE)
        outcomes = dict.fromkeys(keys, Outcome.MISS)
        # Deepest first, so that a whole chain goes without leaving ghosts.
        for part in parts(sorted(depth, key=lambda key: -depth[key])):
            with state.locked() as book:
                for key in part:
                    outcomes[key] = self._remove_one(book, book.resident(key, namespace))
                state.changed.notify_all()
        return tuple(outcomes[key] for key in keys)

    def _remove_one(self, book: Book, slot: int) -> Outcome:
        if slot == NONE:
            return Outcome.MISS
        if slot in book.holds or any(copy_number(slot, tier) in book.pins for tier in book.tiers):
            return Outcome.BUSY
        book.drop_everywhere(slot, Reason.REMOVED)
        return Outcome.HIT

    def evict(
        self, tier: Tier, namespace_id: NamespaceId | None, keys: Sequence[BlockKey], nbytes: int, stop: Stop = never
    ) -> EvictReport:
        """See ``Store.evict``."""
        validate.check_keys(keys)
        validate.check_tier(tier, self._tiers())
        if keys and nbytes:
            raise InvalidArgument("bytes", nbytes, "0 when keys are given")
        if nbytes < 0 or (not keys and not nbytes):
            raise InvalidArgument("bytes", nbytes, "1 or more when no keys are given")
        if keys and namespace_id is None:
            raise InvalidArgument("namespace_id", "empty", "the namespace of the keys")
        before = self._level(tier)
        outcomes: tuple[Outcome, ...] = ()
        reasons: tuple[str, ...] = ()
        if namespace_id is not None and keys:
            outcomes, reasons = self._evict_keys(tier, namespace_id, keys, stop)
        else:
            self._evict_coldest(tier, nbytes, before, stop)
        after = self._level(tier)
        went, kept = max(before[1] - after[1], 0), 0
        if not keys and went < nbytes:
            with self._state.locked() as book:
                held = sum(book.nbytes(slot, tier) for slot in book.holds if book.has(slot, tier))
                kept = max(book.pinned_bytes(tier), held)
        return EvictReport(max(before[0] - after[0], 0), went, outcomes, reasons, kept)

    def forget(self, namespace_id: NamespaceId, limit: int, stop: Stop = never) -> ForgetReport:
        """See ``Store.forget``. Deepest first, so that chains go without leaving ghosts."""
        state, removed, kept = self._state, 0, 0
        with state.locked() as book:
            namespace = state.namespaces.get(namespace_id)
            names = book.index.blocks(namespace.number)
            depth = {slot: book.index.depth[slot] for _, _, slot in names}
        names.sort(key=lambda name: -depth[name[2]])
        for part in parts(names):
            if removed >= limit or stop():
                break
            with state.locked() as book:
                for _, key, _ in part:
                    slot = book.resident(key, namespace)
                    if slot != NONE:
                        gone = self._remove_one(book, slot) is Outcome.HIT
                        removed, kept = removed + gone, kept + (not gone)
                state.changed.notify_all()
        with state.locked():
            return ForgetReport(removed, kept, namespace.blocks)

    def _evict_coldest(self, tier: Tier, nbytes: int, before: tuple[int, int], stop: Stop) -> None:
        """Free ``nbytes``, or what may go of it, in pieces: an operator who asks for all there is gets all that can."""
        piece = PIECE_BLOCKS
        # Others may commit meanwhile: no more turns than blocks there were, and those that find nothing.
        for _ in range(before[0] + PIECE_BLOCKS.bit_length()):
            left = nbytes - (before[1] - self._level(tier)[1])
            if left <= 0 or not piece or stop():
                return
            if not self._movement.make_room(tier, left, total=True, limit=piece):
                piece //= 2

    def _tiers(self) -> list[Tier]:
        state = self._state
        return [*state.arenas, *state.storages]

    def _level(self, tier: Tier) -> tuple[int, int]:
        with self._state.locked() as book:
            return book.blocks[tier], book.bytes[tier]

    def _evict_keys(
        self, tier: Tier, namespace_id: NamespaceId, keys: Sequence[BlockKey], stop: Stop
    ) -> tuple[tuple[Outcome, ...], tuple[str, ...]]:
        with self._state.locked() as book:
            namespace = self._state.namespaces.get(namespace_id)
            slots = {key: book.resident(key, namespace) for key in keys}
            depth = {key: book.index.depth[slot] if slot != NONE else 0 for key, slot in slots.items()}
            for slot in slots.values():
                if slot != NONE:
                    book.ref(slot)
        outcomes, reasons = dict.fromkeys(keys, Outcome.MISS), dict[BlockKey, str]()
        left = sorted((key for key in slots if slots[key] != NONE), key=lambda k: depth[k])
        try:
            # Deepest first. Each slot is let go at once: while it is remembered, its parent counts as having a child.
            while left and not stop():
                outcomes[left[-1]] = self._movement.evict_one(slots[left[-1]], tier)
                with self._state.locked() as book:
                    if outcomes[left[-1]] is Outcome.BUSY:
                        reasons[left[-1]] = " ".join(reasons_to_stay(book, self._state, slots[left[-1]], tier))
                    book.unref(slots[left.pop()])
        finally:
            with self._state.locked() as book:
                for key in left:
                    book.unref(slots[key])
        return tuple(outcomes[key] for key in keys), tuple(reasons.get(key, "") for key in keys)

    def pin(self, name: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Store.pin``."""
        validate.check_keys(keys)
        validate.check_pin_name(name)
        outcomes = []
        for part in parts(keys):
            with self._state.locked() as book:
                namespace = self._state.namespaces.get(namespace_id)
                for key in part:
                    slot = book.resident(key, namespace)
                    outcomes.append(Outcome.MISS if slot == NONE else Outcome.HIT)
                    if slot == NONE:
                        continue
                    held = self._state.owners.operator_pins.setdefault(name, {}).setdefault(namespace_id, set())
                    if slot not in held:
                        held.add(slot)
                        book.hold(slot)
        return tuple(outcomes)

    def unpin(self, name: str, namespace_id: NamespaceId | None, keys: Sequence[BlockKey]) -> int:
        """See ``Store.unpin``."""
        validate.check_keys(keys)
        validate.check_pin_name(name)
        if keys and namespace_id is None:
            raise InvalidArgument("namespace_id", "empty", "the namespace of the keys")
        with self._state.locked():
            if namespace_id is not None:
                self._state.namespaces.get(namespace_id)
            by_namespace = self._state.owners.operator_pins.get(name, {})
            chosen = [namespace_id] if namespace_id is not None else list(by_namespace)
        return sum(self._unpin(name, one, keys) for one in chosen)

    def _unpin(self, name: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        state, released = self._state, 0
        while True:
            with state.locked() as book:
                by_namespace = state.owners.operator_pins.get(name, {})
                held = by_namespace.get(namespace_id, set())
                if keys:
                    part, keys = keys[:SECTION], keys[SECTION:]
                    slots = book.index.slots(state.namespaces.get(namespace_id).number)
                    wanted = [slot for slot in (slots.get(key, NONE) for key in part) if slot in held]
                    done = not keys
                else:
                    wanted = list(islice(held, SECTION))
                    done = len(wanted) == len(held)
                for slot in wanted:
                    held.remove(slot)
                    book.unhold(slot)
                released += len(wanted)
                if not held:
                    by_namespace.pop(namespace_id, None)
                if not by_namespace:
                    state.owners.operator_pins.pop(name, None)
                if done:
                    return released
