"""What engines ask for, while somebody records it: each Match as numbers, without a key.

Off unless it was asked for within ``KEPT_S``, so that nobody pays for it. Called with the store's lock held.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.store.report import TraceEntry, TraceReport
from kvstore.store.tables.namespaces import Namespace

KEPT_S: Final = 60.0
"""How long a recording outlives the last question for it."""

ENTRIES_MAX: Final = 4096
IDS_MAX: Final = 1 << 20
"""Blocks of the entries that are kept: as many again are dropped, oldest first."""

_IDS: Final = (1 << 64) - 1


class Recording:
    """The calls of one store, as long as somebody asks for them."""

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._until = 0.0
        self.on = False
        """Whether calls are recorded; every match asks."""
        self._sequence = 0
        self._entries: deque[TraceEntry] = deque()
        self._kept_ids = 0

    def add(self, namespace: Namespace, keys: Sequence[BlockKey], matched: int) -> None:
        """A Match was answered."""
        if self._clock.now() >= self._until:
            self.end()
            return
        # Python's own hash of bytes: keyed anew in each process, so it tells nothing of the key.
        ids = tuple([hash((namespace.number, key)) & _IDS for key in keys])
        self._sequence += 1
        self._entries.append(
            TraceEntry(self._sequence, self._wall(), namespace.namespace_id, namespace.spec.block_tokens, ids, matched)
        )
        self._kept_ids += len(ids)
        while len(self._entries) > ENTRIES_MAX or (self._kept_ids > IDS_MAX and len(self._entries) > 1):
            self._kept_ids -= len(self._entries.popleft().prefix_ids)

    def after(self, sequence: int, limit_ids: int) -> TraceReport:
        """Entries behind a sequence, as many as have so many blocks. 0 begins anew where nothing is recorded."""
        if sequence == 0 and self._clock.now() >= self._until:
            self.end()
        self._until = self._clock.now() + KEPT_S
        self.on = True
        found: list[TraceEntry] = []
        for entry in self._entries:
            if entry.sequence > sequence:
                if found and limit_ids < len(entry.prefix_ids):
                    break
                limit_ids -= len(entry.prefix_ids)
                found.append(entry)
        # What was read is not wanted again.
        while self._entries and self._entries[0].sequence <= sequence:
            self._kept_ids -= len(self._entries.popleft().prefix_ids)
        lost = max(0, found[0].sequence - sequence - 1) if found and sequence else 0
        return TraceReport(tuple(found), found[-1].sequence if found else max(sequence, self._sequence), lost)

    def end(self) -> None:
        """Forget everything."""
        self._until, self._kept_ids, self.on = 0.0, 0, False
        self._entries.clear()
