"""What operators ask: status, lists, one block, why. Bookkeeping only; nothing here moves a byte or waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvstore.cache import NearNamespace
from kvstore.core.errors import InvalidArgument, UnknownBlock
from kvstore.core.keys import chain_keys
from kvstore.core.types import KEY_BYTES, BlockKey, LeaseId, NamespaceId, Reason, Tier
from kvstore.store.columns.index import NONE, TIER_MASK
from kvstore.store.moves.space import Space
from kvstore.store.report import (
    BlockPage,
    BlockReport,
    ExplainReport,
    LeaseReport,
    NamespaceReport,
    SessionReport,
    StatusReport,
    TierReport,
    TraceReport,
    TreeReport,
    WhyReport,
)  # fmt: skip
from kvstore.store.tables import validate
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.state import State
from kvstore.store.verbs.chains import tree_of
from kvstore.store.verbs.explain import explain
from kvstore.store.verbs.get import Get
from kvstore.tiers.base import DiskTier, RecoveryReport
from kvstore.tiers.maintained import Maintained

LIST_LIMIT_MAX = 10_000
PREFIX_BYTES_MIN = 4
SEARCH_SLOTS = 1 << 16
"""Keys compared in one locked section."""
TRACE_IDS_MAX = 1 << 18
"""Blocks of the entries in one answer: 2.3 MiB at most, of the 4 that a message may have."""


class Admin:
    """The verbs that look."""

    def __init__(self, state: State, get: Get, space: Space, boot_id: bytes) -> None:
        self._state = state
        self._get = get
        self._space = space
        self._boot_id = boot_id
        self._start = state.clock.now()

    def status(self) -> StatusReport:
        """See ``Store.status``."""
        state = self._state
        disk = state.disk
        health = disk.state if disk is not None else None
        with state.locked() as book:
            owners = state.owners
            counters = dict(book.counters)
            tiers = tuple(self._tier(book, tier) for tier in state.arenas)
            sessions, leases = len(owners.sessions), len(owners.leases)
            reservations, jobs = len(owners.reservations), len(owners.jobs)
            counters["blocks_held"], counters["copies_pinned"] = len(book.holds), len(book.pins)
            counters["copies_filling"], counters["copies_doomed"] = len(book.fills), len(book.doomed)
            counters["lease_deadlines"], counters["slots_remembered"] = owners.deadlines, len(book.refs)
            counters["copies_under_io"] = len(book.io)
            counters["sessions_with_io"] = sum(owner.buffer_io > 0 for owner in owners.sessions.values())
            counters["buffer_used_bytes"] = sum(o.buffer.used_bytes for o in owners.sessions.values() if o.buffer)
            stored = {tier: self._tier(book, tier) for tier in state.storages}
            counters.update(state.held())
        tiers += tuple(_with_disk(stored[tier], storage) for tier, storage in state.storages.items())
        counters["loads_queued"], counters["writes_queued"] = self._get.queued
        if health is not None:
            counters.update({f"disk_{name}": value for name, value in health.counters.items()})
        warnings = tuple(w for arena in state.arenas.values() for w in arena.warnings)
        for tier, storage in state.storages.items():
            found = storage.state
            if not found.ready:
                why = f"{found.state}: {found.last_error}"
                warnings += (f"the {tier.name} tier is {why}; blocks that are only there are misses",)
        return StatusReport(
            boot_id=self._boot_id,
            uptime_seconds=state.clock.now() - self._start,
            tiers=tiers,
            namespaces=len(state.namespaces),
            sessions=sessions,
            leases=leases,
            reservations=reservations,
            jobs=jobs,
            draining=state.draining,
            recovery=disk.report if disk is not None else RecoveryReport(mode="off"),
            counters=counters,
            warnings=warnings,
            index=book.index.form,
            transfers=state.transfers.by_edge(),
            slow=state.transfers.slow,
        )

    def _tier(self, book: Book, tier: Tier) -> TierReport:
        state = self._state
        arena = state.arenas.get(tier)
        word = tier.name.lower()
        marks = state.config.marks(tier)
        return TierReport(
            tier=tier,
            capacity_bytes=arena.capacity_bytes if arena else 0,
            used_bytes=arena.used_bytes if arena else 0,
            reserved_bytes=state.reserved_bytes if tier is Tier.DEVICE else 0,
            blocks=book.blocks[tier],
            pinned_bytes=book.pinned_bytes(tier),
            backing=arena.backing if arena else "O_DIRECT segments",
            evicted=book.counters[f"{word}_evicted"],
            demoted=book.counters[f"{word}_demoted"],
            promoted=book.counters[f"{word}_promoted"],
            removed=book.counters[f"{word}_removed"],
            high_watermark=marks.high,
            low_watermark=marks.low,
            raw_bytes=book.raw_bytes[tier],
            saved_bytes=book.raw_bytes[tier] - book.bytes[tier],
            fragmentation=arena.fragmentation if arena else 0.0,
        )

    def namespaces(self) -> tuple[NamespaceReport, ...]:
        """See ``Store.namespaces``."""
        with self._state.locked() as book:
            entries = list(self._state.namespaces)
        # Counted without the lock, one by one: there may be hundreds of thousands.
        return tuple(
            NamespaceReport(
                e.namespace_id, e.name, e.spec, e.policy, e.layout, e.blocks,
                tuple(e.blocks_by_tier[1 : max(*book.tiers, Tier.SSD) + 1]),
                e.saved_bytes, e.brought, e.evicted,
            )
            for e in entries
        )  # fmt: skip

    def list_blocks(
        self, namespace_id: NamespaceId | None, tier: Tier | None, limit: int, page_token: str
    ) -> BlockPage:
        """See ``Store.list_blocks``. In order of last use; what is used between pages may be seen twice."""
        if not 1 <= limit <= LIST_LIMIT_MAX:
            raise InvalidArgument("limit", limit, f"1 to {LIST_LIMIT_MAX}")
        after = _parse_token(page_token)
        with self._state.locked() as book:
            number = self._state.namespaces.get(namespace_id).number if namespace_id is not None else None
            index, top = book.index, book.index.top
            residency, numbers = np.array(index.residency[:top]), np.array(index.namespace[:top])
            last_use = np.array(index.last_use[:top], dtype=np.int64)
        # Sorted from copies of the columns: a long list must not hold the lock.
        chosen = residency & (0xFF if tier is None else tier.bit) != 0
        if number is not None:
            chosen &= numbers == number
        slots = np.flatnonzero(chosen)
        uses = last_use[slots]
        later = (uses > after[0]) | ((uses == after[0]) & (slots > after[1]))
        slots, uses = slots[later], uses[later]
        page = np.lexsort((slots, uses))[:limit]
        with self._state.locked() as book:
            blocks = tuple(self._block(book, slot) for slot in slots[page].tolist() if book.index.residency[slot])
        more = len(slots) > limit
        return BlockPage(blocks, f"{uses[page[-1]]}.{slots[page[-1]]}" if more else "")

    def tree(self, namespace_id: NamespaceId, limit: int) -> TreeReport:
        """See ``Store.tree``."""
        with self._state.locked():
            namespace = self._state.namespaces.get(namespace_id)
        return tree_of(self._state, namespace, limit)

    def explain(self, namespace_id: NamespaceId, key_prefix: bytes) -> ExplainReport:
        """See ``Store.explain``."""
        with self._state.locked() as book:
            namespace = self._state.namespaces.get(namespace_id)
            key = BlockKey(key_prefix)
            missing = self._get.why_missing(book, key, namespace)
        if len(key_prefix) < KEY_BYTES:
            key = self.show_block(key_prefix, namespace_id).key
        return explain(self._state, self._space, key, namespace, missing)

    def trace(self, after_sequence: int) -> TraceReport:
        """See ``Store.trace``."""
        with self._state.locked() as book:
            try:
                return self._state.recording.after(after_sequence, TRACE_IDS_MAX)
            finally:
                self._state.tell_readers(book)

    def show_block(self, key_prefix: bytes, namespace_id: NamespaceId | None) -> BlockReport:
        """See ``Store.show_block``."""
        if not PREFIX_BYTES_MIN <= len(key_prefix) <= 32:
            raise InvalidArgument("key_prefix", f"{len(key_prefix)} bytes", f"{PREFIX_BYTES_MIN} to 32 bytes")
        candidates, begin, top = list[int](), 0, 1
        while begin < top:
            # In steps: a long table must not hold the lock.
            with self._state.locked() as book:
                candidates += book.index.with_prefix(key_prefix, begin, begin + SEARCH_SLOTS)
                begin, top = begin + SEARCH_SLOTS, book.index.top
        with self._state.locked() as book:
            namespace = self._state.namespaces.get(namespace_id) if namespace_id is not None else None
            matching = [
                slot for slot in candidates
                if (book.index.key_at(slot) or b"").startswith(key_prefix) and book.index.residency[slot]
                and (namespace is None or book.namespace(slot) is namespace)
            ]  # fmt: skip
            if len(matching) > 1:
                wanted = f"more bytes, or the namespace: {len(matching)} blocks have such a key"
                raise InvalidArgument("key_prefix", key_prefix.hex(), wanted)
            if not matching:
                raise UnknownBlock(
                    f"no resident block begins with {key_prefix.hex()}", field="key_prefix", value=key_prefix.hex()
                )
            return self._block(book, matching[0])

    def _block(self, book: Book, slot: int) -> BlockReport:
        index = book.index
        places = {
            tier.name: str(index.offset(slot, tier) if tier in book.arenas else index.place[tier][slot])
            for tier in book.tiers
            if book.has(slot, tier)
        }
        numbers = [copy_number(slot, tier) for tier in book.tiers]
        filling = [Tier(n & TIER_MASK).name for n in numbers if n in book.fills]
        state = f"filling {', '.join(filling)}" if filling else "ready" if index.residency[slot] else "absent"
        return BlockReport(
            key=index.key_of(slot),
            parent=index.parent_key(slot),
            namespace_id=book.namespace(slot).namespace_id,
            residency=index.residency[slot],
            state=state,
            pins=sum(book.pins.get(n, 0) for n in numbers),
            holds=book.holds.get(slot, 0),
            children=index.children[slot],
            idle_seconds=book.uses.idle_seconds(slot, self._state.clock.now()),
            hits=index.hits[slot],
            places=places,
            codec=book.codec(slot),
        )

    def why(self, namespace_id: NamespaceId, token_ids: Sequence[int], keys: Sequence[BlockKey]) -> WhyReport:
        """See ``Store.why``."""
        if bool(token_ids) == bool(keys):
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", "tokens or keys, and not both")
        validate.check_keys(keys)
        with self._state.locked() as book:
            namespace = self._state.namespaces.get(namespace_id)
            others = [e for e in self._state.namespaces.of_model(namespace.spec.model) if e is not namespace]
        chain = list(keys) or chain_keys(namespace_id, token_ids, namespace.spec.block_tokens)
        candidates = {
            other.namespace_id: chain_keys(other.namespace_id, token_ids, other.spec.block_tokens)
            for other in others
            if token_ids
        }
        with self._state.locked() as book:
            residency = self._matched(book, chain, namespace)
            near = self._near(book, namespace, candidates, len(residency))
            if len(residency) == len(chain):
                text = f"all {len(chain)} blocks are resident"
                return WhyReport(len(chain), len(chain), residency, b"", Reason.NONE, text, near=near)
            key = chain[len(residency)]
            reason = self._get.why_missing(book, key, namespace)
            found = book.tombstones.get((namespace_id, key))
            ago = self._state.clock.now() - found.at if found is not None else 0.0
        text = f"block {len(residency)} of {len(chain)} ({key.hex()[:16]}) {_EXPLAIN[reason].format(ago=ago)}"
        if near and near[0].blocks:
            text += f"; {near[0].blocks} blocks match in a namespace that differs in {', '.join(near[0].fields)}"
        return WhyReport(len(chain), len(residency), residency, key, reason, text, ago, near)

    def _matched(self, book: Book, chain: Sequence[BlockKey], namespace: Namespace) -> tuple[int, ...]:
        found = []
        for key in chain:
            slot = book.resident(key, namespace)
            usable = book.index.residency[slot] & self._state.readable if slot != NONE else 0
            if not usable:
                break
            found.append(usable)
        return tuple(found)

    def _near(
        self, book: Book, namespace: Namespace, candidates: dict[NamespaceId, list[BlockKey]], matched: int
    ) -> tuple[NearNamespace, ...]:
        near = []
        for namespace_id, chain in candidates.items():
            other = self._state.namespaces.find(namespace_id)
            if other is None:
                continue
            hits = len(self._matched(book, chain, other))
            if hits > matched:
                near.append(NearNamespace(namespace_id, namespace.spec.differing_fields(other.spec), hits))
        return tuple(sorted(near, key=lambda n: -n.blocks))

    def leases(self) -> tuple[LeaseReport, ...]:
        """See ``Store.leases``."""
        with self._state.locked():
            now = self._state.clock.now()
            owned = tuple(
                LeaseReport(
                    x.lease_id, x.name, x.owner.name, x.owner.pid, max(x.deadline - now, 0.0) if x.timed else 0.0,
                    len(x.holds), len(x.pins), x.buffer_bytes,
                )
                for x in self._state.owners.leases.values()
            )  # fmt: skip
            operators = tuple(
                LeaseReport(LeaseId(0), name, "operator", 0, 0.0, sum(map(len, held.values())), 0, 0)
                for name, held in self._state.owners.operator_pins.items()
            )
        return owned + operators

    def sessions(self) -> tuple[SessionReport, ...]:
        """See ``Store.sessions``."""
        with self._state.locked():
            return tuple(
                SessionReport(
                    s.session_id, s.name, s.pid, s.uid, s.buffer.capacity_bytes if s.buffer else 0,
                    s.buffer.used_bytes if s.buffer else 0, len(s.reservations), s.remote,
                )
                for s in self._state.owners.sessions.values()
            )  # fmt: skip


def _with_disk(report: TierReport, storage: DiskTier) -> TierReport:
    health, size = storage.state, storage.capacity_bytes
    # A cap that the filesystem has no room for says nothing: what can be filled is the tier's size.
    capacity = size if health.room_bytes is None else min(size, health.room_bytes)
    return replace(
        report, state=health.state, last_error=health.last_error, capacity_bytes=capacity,
        used_bytes=storage.used_bytes, fragmentation=storage.fragmentation if isinstance(storage, Maintained) else 0.0,
    )  # fmt: skip


def _parse_token(token: str) -> tuple[int, int]:
    if not token:
        return (-1, -1)
    use, _, slot = token.partition(".")
    if not (use.isdigit() and slot.isdigit()):
        raise InvalidArgument("page_token", repr(token), "the next_page_token of the page before")
    return int(use), int(slot)


_EXPLAIN = {
    Reason.NEVER_STORED: "was never stored here, as far as is remembered",
    Reason.EVICTED: "was evicted for space {ago:.1f} s ago",
    Reason.REMOVED: "was removed on request {ago:.1f} s ago",
    Reason.QUARANTINED: "failed its checksum and was set aside {ago:.1f} s ago",
    Reason.UNCOMMITTED: "is being written by someone and not committed yet",
    Reason.TIER_UNAVAILABLE: "is on SSD only, and that tier does not answer now",
    Reason.DROPPED: "was not kept: its write was dropped {ago:.1f} s ago",
}
