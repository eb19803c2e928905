"""Durability on request: what a commit or a flush promises to have survived to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.errors import TierUnavailable
from kvstore.core.types import Reason, Tier
from kvstore.store.movement import Failures, Movement
from kvstore.store.persist import Persister
from kvstore.store.report import FlushReport


class Durably:
    """Writes now and syncs, in the calling thread."""

    def __init__(self, movement: Movement, persister: Persister) -> None:
        self._movement = movement
        self._state = movement.state
        self._persister = persister

    def write(self, slots: Sequence[int]) -> Failures:
        """Make these blocks and their ancestors durable; the caller holds refs. Failures name what is not."""
        lineage = self._persister.with_ancestors(slots)
        try:
            failures = self._persister.to_ssd(lineage, durable=True)
        finally:
            with self._state.locked() as book:
                for slot in lineage:
                    book.unref(slot)
        if not self._sync():
            return dict.fromkeys(slots, Reason.TIER_UNAVAILABLE)
        return self._inherited(slots, failures)

    def flush(self, seconds: float) -> FlushReport:
        """Write every block that is not on SSD, parents first, within ``seconds``; then sync."""
        deadline = self._state.clock.now() + seconds
        before = self._written()
        with self._state.locked() as book:
            index = book.index
            residency = np.frombuffer(index.residency, np.uint8)[: index.top]
            missing = np.flatnonzero((residency != 0) & (residency & Tier.SSD.bit == 0)).tolist()
            del residency
            missing.sort(key=lambda slot: index.depth[slot])
            ordered = in_chains(missing, index.parent)
            for slot in ordered:
                book.ref(slot)
        step = self._state.config.extent_blocks_max
        try:
            for begin in range(0, len(ordered), step):
                if self._state.clock.now() > deadline:
                    break
                self._persister.to_ssd(ordered[begin : begin + step])
        finally:
            with self._state.locked() as book:
                for slot in ordered:
                    book.unref(slot)
        self._sync()
        after = self._written()
        return FlushReport(after[0] - before[0], after[1] - before[1])

    def unflushed(self) -> int:
        """Blocks that are not on SSD."""
        with self._state.locked() as book:
            residency = np.frombuffer(book.index.residency, np.uint8)[: book.index.top]
            missing = int(np.count_nonzero((residency != 0) & (residency & Tier.SSD.bit == 0)))
            del residency
        return missing

    def _written(self) -> tuple[int, int]:
        with self._state.locked() as book:
            return book.counters["ssd_blocks_written"], book.counters["ssd_bytes_written"]

    def _sync(self) -> bool:
        """Sync what was written without; True if all of it is durable."""
        with self._state.locked():
            unsynced, self._state.unsynced_writes = self._state.unsynced_writes, 0
        disk = self._state.disk
        if disk is None:
            return False
        if not unsynced:
            return True
        try:
            disk.flush()
        except TierUnavailable:
            with self._state.locked():
                self._state.unsynced_writes += unsynced
            self._movement.look_at_disk()
            return False
        return True

    def _inherited(self, slots: Sequence[int], failures: Failures) -> Failures:
        """A block is durable only if its ancestors are: without them a restart could not reach it."""
        found: Failures = {}
        with self._state.locked() as book:
            for slot in slots:
                walk = slot
                while walk >= 0 and walk not in failures and (walk != slot or book.has(slot, Tier.SSD)):
                    if walk != slot and book.has(walk, Tier.SSD):
                        break
                    walk = book.index.parent[walk]
                if walk in failures:
                    found[slot] = failures[walk]
        return found


def in_chains(slots: Sequence[int], parent: Sequence[int]) -> list[int]:
    """Slots, given by depth, reordered so that a parent is followed by one of its children wherever possible."""
    first_child: dict[int, int] = {}
    for slot in slots:
        first_child.setdefault(parent[slot], slot)
    ordered: list[int] = []
    done: set[int] = set()
    for slot in slots:
        walk: int | None = slot
        while walk is not None and walk not in done:
            done.add(walk)
            ordered.append(walk)
            walk = first_child.get(walk)
    return ordered
