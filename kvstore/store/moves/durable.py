"""Durability on request: what a commit or a flush promises to have survived to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.core.errors import TierUnavailable
from kvstore.core.stop import Stop
from kvstore.core.types import Reason, Tier
from kvstore.store.columns.index import NONE
from kvstore.store.moves.move import Failures, Movement
from kvstore.store.moves.persist import Persister, in_chains
from kvstore.store.report import FlushReport
from kvstore.store.tables.book import Book
from kvstore.store.tables.state import parts

log = logging.getLogger(__name__)

WRITE_ROUNDS: Final = 2
"""A block that was on SSD and turns out to be lost there is written again, once."""


class Durably:
    """Writes now and syncs, in the calling thread."""

    def __init__(self, movement: Movement, persister: Persister) -> None:
        self._movement = movement
        self._state = movement.state
        self._persister = persister

    def write(self, slots: Sequence[int]) -> Failures:
        """Make these blocks and their ancestors durable; the caller holds refs. Failures name what is not."""
        for _ in range(WRITE_ROUNDS):
            failures = self._write_once(slots)
            left: list[int] = []
            for part in parts(slots):
                with self._state.locked() as book:
                    self._movement.forget_lost(book)
                    left += [slot for slot in part if slot not in failures and self._is_missing(book, slot)]
            if not left:
                return failures
        return failures | dict.fromkeys(left, Reason.DROPPED)

    def _is_missing(self, book: Book, slot: int) -> bool:
        """Whether a block, or the one before it, is in memory and not on SSD."""
        residency = book.index.residency
        return any(
            residency[one] and not residency[one] & self._state.stored
            for one in (slot, book.index.parent[slot])
            if one >= 0
        )

    def _write_once(self, slots: Sequence[int]) -> Failures:
        lineage = self._persister.with_ancestors(slots)
        try:
            failures = self._persister.to_ssd(lineage, durable=True)
        finally:
            for part in parts(lineage):
                with self._state.locked() as book:
                    for slot in part:
                        book.unref(slot)
        if not self._sync():
            return dict.fromkeys(slots, Reason.TIER_UNAVAILABLE)
        return self._inherited(slots, failures)

    def is_durable(self, book: Book, slot: int) -> bool:
        """Whether a block and its parent are on SSD, and all that was written there is synced, where what the disk
        has lost was forgotten before."""
        parent = book.index.parent[slot]
        synced = self._state.synced >= self._state.writes
        residency, stored = book.index.residency, self._state.stored
        return bool(synced and residency[slot] & stored and (parent < 0 or residency[parent] & stored))

    def flush(self, seconds: float, stop: Stop) -> FlushReport:
        """Write every block that is not on SSD, parents first, within ``seconds`` until ``stop``; then sync."""
        deadline = self._state.clock.now() + seconds
        before = self._written()
        ordered = self._missing()
        with self._state.locked() as book:
            names = [book.name(slot) for slot in ordered if book.index.key_at(slot) is not None]
        step = self._state.config.extent_blocks_max
        for begin in range(0, len(ordered), step):
            if self._state.clock.now() > deadline or stop():
                break
            self._write_some(ordered[begin : begin + step])
        failure = "" if self._sync() else "what was written could not be synced"
        with self._state.locked() as book:
            self._movement.forget_lost(book)
            slots, residency = map(book.find, names), book.index.residency
            left = sum(
                bool(residency[slot]) and not residency[slot] & self._state.stored for slot in slots if slot != NONE
            )
        if left and not failure:
            failure = f"{left} blocks are not on SSD, of {len(ordered)} that were not"
        after = self._written()
        return FlushReport(after[0] - before[0], after[1] - before[1], failure)

    def _missing(self) -> list[int]:
        """Slots of blocks that are not on SSD, chain by chain; sorted from copies of the columns, without the lock."""
        with self._state.locked() as book:
            self._movement.forget_lost(book)
            index = book.index
            residency = np.frombuffer(index.residency, np.uint8)[: index.top]
            missing = np.flatnonzero((residency != 0) & (residency & self._state.stored == 0))
            del residency
            depths = np.frombuffer(index.depth, np.uint16)[missing]
            parents = np.frombuffer(index.parent, np.int32)[missing]
        order = np.argsort(depths, kind="stable")
        return in_chains(missing[order].tolist(), parents[order].tolist())

    def _write_some(self, slots: Sequence[int]) -> None:
        with self._state.locked() as book:
            # Some may have gone or been written since they were listed.
            left = [s for s in slots if book.index.residency[s] and not book.index.residency[s] & self._state.stored]
            for slot in left:
                book.ref(slot)
        try:
            self._persister.to_ssd(left)
        finally:
            with self._state.locked() as book:
                for slot in left:
                    book.unref(slot)

    def unflushed(self) -> int:
        """Blocks that are not on SSD."""
        with self._state.locked() as book:
            residency = np.frombuffer(book.index.residency, np.uint8)[: book.index.top]
            missing = int(np.count_nonzero((residency != 0) & (residency & self._state.stored == 0)))
            del residency
        return missing

    def _written(self) -> tuple[int, int]:
        with self._state.locked() as book:
            return book.counters["ssd_blocks_written"], book.counters["ssd_bytes_written"]

    def _sync(self) -> bool:
        """Sync what was written without; True if everything written before this call is durable."""
        with self._state.locked():
            writes, drops = self._state.writes, self._state.drops
            synced = self._state.synced >= writes and self._state.drops_synced >= drops
        disk = self._state.disk
        if disk is None:
            return False
        if synced:
            return True
        try:
            disk.flush()
        except TierUnavailable as error:
            log.warning("what was written to SSD could not be synced: %s", error)
            self._movement.look_at(Tier.SSD)
            return False
        with self._state.locked():
            self._state.synced = max(self._state.synced, writes)
            self._state.drops_synced = max(self._state.drops_synced, drops)
        return True

    def _inherited(self, slots: Sequence[int], failures: Failures) -> Failures:
        """A block is durable only if its ancestors are: without them a restart could not reach it."""
        found: Failures = {}
        for part in parts(slots):
            with self._state.locked() as book:
                residency, stored = book.index.residency, self._state.stored
                for slot in part:
                    walk = slot
                    while walk >= 0 and walk not in failures and (walk != slot or residency[slot] & stored):
                        if walk != slot and residency[walk] & stored:
                            break
                        walk = book.index.parent[walk]
                    if walk in failures:
                        found[slot] = failures[walk]
        return found
