"""What happened: events for routers, tombstones for ``why``, counters for operators. Guarded by the store's lock."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from kvstore.core.types import ROOT_PARENT, BlockKey, BlockName, NamespaceId, Reason, Tier
from kvstore.store.report import BlockEvent, EventKind
from kvstore.store.tables.namespaces import Namespace

trace = logging.getLogger("kvstore.store.trace")
"""Names each copy that comes and goes, and each block whose last copy went, at level debug, before anything else is
done about it: what is gone from SSD after a crash was named here, with the cause, before its drop reached the disk.
``crashtest --daemon`` reads it."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Why and when (seconds of the store's clock) the last copy of a block went."""

    reason: Reason
    at: float


class Tombstones:
    """The last dropped blocks, bounded; the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._traced = trace.isEnabledFor(logging.DEBUG)
        self._kept: OrderedDict[BlockName, Tombstone] = OrderedDict()

    def add(self, name: BlockName, reason: Reason, now: float) -> None:
        """Remember that a block went."""
        if self._traced:
            trace.debug("gone %s %s", name[1].hex(), reason.name)
        self._kept[name] = Tombstone(reason, now)
        self._kept.move_to_end(name)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def forget(self, name: BlockName) -> None:
        """The block is resident again."""
        self._kept.pop(name, None)

    def get(self, name: BlockName) -> Tombstone | None:
        """What is remembered of a block that is not resident."""
        return self._kept.get(name)

    def reason(self, name: BlockName) -> Reason:
        """Why the block is a miss, as far as is remembered."""
        found = self._kept.get(name)
        return found.reason if found else Reason.NEVER_STORED


class EventLog:
    """A ring of numbered events: the newest, and as many before as speak of ``blocks_max`` blocks in all.

    Numbers go up by one from ``epoch`` + 1. A daemon gives each start an epoch above all numbers before, so that a
    number of an earlier run is one of events that are no longer kept.
    """

    def __init__(self, blocks_max: int, epoch: int = 0) -> None:
        self._ring: list[BlockEvent] = []
        self._gone = 0
        """Events at the head of the list that are no longer kept."""
        self._max = blocks_max
        self._blocks = 0
        self.last = epoch

    def add(self, event: BlockEvent) -> None:
        """Append one event, numbered by the log; the oldest go to make room."""
        self.last += 1
        self._ring.append(event if event.sequence == self.last else replace(event, sequence=self.last))
        self._blocks += len(event.keys)
        while self._blocks > self._max and len(self._ring) - self._gone > 1:
            self._blocks -= len(self._ring[self._gone].keys)
            self._gone += 1
        if self._gone > len(self._ring) // 2:
            del self._ring[: self._gone]
            self._gone = 0

    def after(
        self, sequence: int, namespaces: Container[NamespaceId] | None, limit: int, looked_at_max: int = 1 << 62
    ) -> tuple[list[BlockEvent], int]:
        """Events above ``sequence``, after a GAP if the first of them are no longer kept, and the number up to which
        all was looked at: from there on the next call goes, whether there was anything for this reader or not."""
        found: list[BlockEvent] = []
        kept = len(self._ring) - self._gone
        first = self.last + 1 - kept
        if sequence + 1 < first or sequence > self.last:
            found.append(BlockEvent(first - 1, time.time(), EventKind.GAP))
            sequence = first - 1
        begin = self._gone + sequence + 1 - first
        for event in self._ring[begin : begin + min(looked_at_max, len(self._ring) - begin)]:
            if len(found) >= limit:
                break
            if namespaces is None or event.namespace_id in namespaces:
                found.append(event)
            sequence = event.sequence
        return found, sequence


class News:
    """The events of one locked section: neighbours of one kind, tier and namespace become one event."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.untold: list[tuple[EventKind, Tier, Namespace, BlockKey, BlockKey]] = []
        """What was told since ``publish``."""
        self._traced = trace.isEnabledFor(logging.DEBUG)
        self.token_ids: dict[BlockName, Sequence[int]] = {}
        """Tokens of blocks that are being committed, where the committer sent them."""

    def stored(self, tier: Tier, namespace: Namespace, key: BlockKey, parent: BlockKey) -> None:
        """Note that a copy of a block came."""
        if self._traced:
            trace.debug("stored %s %s", tier.name, key.hex())
        self.untold.append((EventKind.STORED, tier, namespace, key, parent))

    def removed(self, tier: Tier, namespace: Namespace, key: BlockKey, cause: Reason) -> None:
        """Note that a copy of a block went, and why."""
        if self._traced:
            trace.debug("dropped %s %s %s", tier.name, key.hex(), cause.name)
        self.untold.append((EventKind.REMOVED, tier, namespace, key, ROOT_PARENT))

    def publish(self) -> bool:
        """Put what was told into the log, in order; True if there was anything."""
        tokens_sent, self.token_ids = self.token_ids, {}
        if not self.untold:
            return False
        begin, told = 0, self.untold
        for end in range(1, len(told) + 1):
            if end == len(told) or told[end][:3] != told[begin][:3]:
                self._tell(told[begin:end], tokens_sent)
                begin = end
        self.untold.clear()
        return True

    def _tell(
        self,
        told: list[tuple[EventKind, Tier, Namespace, BlockKey, BlockKey]],
        tokens_sent: dict[BlockName, Sequence[int]],
    ) -> None:
        """One event of neighbours. A loop, since most events speak of one block and calls cost more than their work."""
        kind, tier, namespace, _, _ = told[0]
        keys: list[BlockKey] = []
        parents: list[BlockKey] = []
        tokens = array("I")
        known = kind is EventKind.STORED
        for _, _, _, key, parent in told:
            keys.append(key)
            if kind is EventKind.STORED:
                parents.append(parent)
                if known and (some := tokens_sent.get((namespace.namespace_id, key))) is not None:
                    tokens.extend(some)
                else:
                    known = False
        self._log.add(
            BlockEvent(
                sequence=self._log.last + 1,
                unix_seconds=time.time(),
                kind=kind,
                tier=tier,
                namespace_id=namespace.namespace_id,
                keys=tuple(keys),
                parents=tuple(parents),
                token_ids=tokens if known else (),
                block_tokens=namespace.spec.block_tokens,
            )
        )


class Counters(Counter[str]):
    """Events by name since the start; docs/operations.md says what each means."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self[name] += amount
