"""Towards cold: HOST to SSD, in extents: runs of one chain, written together."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence
from functools import partial

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.core.transfers import edge
from kvstore.core.types import Reason, Tier
from kvstore.store.moves.move import Failures, Fill, Movement
from kvstore.store.moves.promote import Promoter
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.state import parts
from kvstore.tiers.base import BlockRead, BlockWrite, DiskHandle, DiskTier, ReadStatus

log = logging.getLogger(__name__)

FULL_TRIES_MAX = 4
"""How often a write that found the disk full is tried again, each time after dropping twice as much."""


class Persister:
    """Writes to SSD. Callers hold refs on the slots that they name."""

    def __init__(self, movement: Movement, promoter: Promoter) -> None:
        self._movement = movement
        self._state = movement.state
        self._promoter = promoter
        movement.demotions[Tier.HOST] = self.demote
        for tier in movement.state.storages:
            movement.demotions[tier] = partial(self.to_colder, tier)

    def to_ssd(self, slots: Sequence[int], *, durable: bool = False) -> Failures:
        """Make READY copies on SSD; a block that is on DEVICE only is copied to HOST first."""
        if self._state.disk is None:
            return dict.fromkeys(slots, Reason.TIER_UNAVAILABLE)
        with self._state.locked() as book:
            device_only = [s for s in slots if book.index.residency[s] == Tier.DEVICE.bit]
        failures = self._promoter.to_host(device_only)
        left = self._by_chain([slot for slot in slots if slot not in failures])
        failures.update(self._movement.fill(left, Tier.SSD, (Tier.HOST,), _Writer(self._movement, durable)))
        return failures

    def to_colder(self, tier: Tier, slots: Sequence[int]) -> Failures:
        """Make READY copies in the next colder storage of blocks that are to leave one."""
        colder = self._state.colder(tier)
        if colder is None:
            return dict.fromkeys(slots, Reason.TIER_UNAVAILABLE)
        ordered = self._by_chain(slots)
        return self._movement.fill(ordered, colder, (Tier.HOST, tier), _Writer(self._movement, False, colder))

    def demote(self, slots: Sequence[int]) -> Failures:
        """Make READY copies on SSD of blocks that are to leave HOST, and of their ancestors in HOST beside them.

        The ancestors leave next, as leaves go first: written now they make one extent instead of many, and a block
        is not on SSD without its parents, where a restart could not reach it.
        """
        extent: dict[int, None] = {}
        with self._state.locked() as book:
            for slot in slots:
                walk = slot
                while (
                    walk >= 0 and walk not in extent and len(extent) < len(slots) + self._state.config.extent_blocks_max
                ):
                    if book.index.residency[walk] & (Tier.HOST.bit | self._state.stored) != Tier.HOST.bit:
                        break
                    extent[walk] = None
                    book.ref(walk)
                    walk = book.index.parent[walk]
        try:
            return self.to_ssd([*extent, *(slot for slot in slots if slot not in extent)])
        finally:
            with self._state.locked() as book:
                for slot in extent:
                    book.unref(slot)

    def _by_chain(self, slots: Sequence[int]) -> list[int]:
        with self._state.locked() as book:
            ordered = sorted(slots, key=book.index.depth.__getitem__)
            return in_chains(ordered, [book.index.parent[slot] for slot in ordered])

    def with_ancestors(self, slots: Iterable[int]) -> list[int]:
        """These and every ancestor that is not on SSD, parents first, with a ref each: what a restart needs."""
        found: dict[int, None] = {}
        for part in parts(list(slots)):
            with self._state.locked() as book:
                for slot in part:
                    lineage = [slot]
                    parent = book.index.parent[slot]
                    while parent >= 0 and parent not in found and not book.index.residency[parent] & self._state.stored:
                        lineage.append(parent)
                        parent = book.index.parent[parent]
                    for one in reversed(lineage):
                        if one not in found and book.index.residency[one]:
                            book.ref(one)
                            found[one] = None
        return list(found)


class _Writer:
    """The work of one ``Movement.fill`` of SSD."""

    def __init__(self, movement: Movement, durable: bool, tier: Tier = Tier.SSD) -> None:
        self._movement = movement
        self._tier = tier
        self._word = tier.name.lower()
        self._state = movement.state
        self._durable = durable

    def __call__(self, fills: list[Fill], failures: Failures) -> None:
        for run in extents(fills, self._state.config.extent_blocks_max):
            reason = self._write_run(run)
            if reason is not None:
                failures.update((fill.slot, reason) for fill in run)
                with self._state.locked() as book:
                    book.counters.count(f"{self._word}_writes_dropped_{reason.name.lower()}", len(run))

    def _write_run(self, run: list[Fill]) -> Reason | None:
        disk = self._state.storages.get(self._tier)
        if disk is None:
            return Reason.TIER_UNAVAILABLE
        namespace, stored = run[0].namespace, self._stored(run)
        if stored is None:
            return Reason.TIER_UNAVAILABLE
        blocks = [BlockWrite(f.key, f.parent, f.codec, data) for f, data in zip(run, stored, strict=True)]
        nbytes = sum(fill.copy.nbytes for fill in run)
        times, way = self._state.transfers, edge(run[0].source, self._tier)
        for attempt in range(FULL_TRIES_MAX):
            began = times.now()
            try:
                self._know_namespace(disk, namespace)
                handles = disk.write(namespace.namespace_id, blocks, durable=self._durable)
            except TierFull as full:
                if full.others or not self._movement.vain.may_try() or not self._make_room(disk, run, attempt):
                    return Reason.NO_SPACE
                continue
            except TierUnavailable as error:
                log.warning("a write of %d blocks to SSD was dropped: %s", len(run), error)
                times.count(way, began, 0, 0, len(run))
                self._movement.look_at(self._tier)
                return Reason.TIER_UNAVAILABLE
            for fill, handle in zip(run, handles, strict=True):
                fill.copy.place = handle
                fill.well = True
            times.count(way, began, len(run), nbytes)
            self._movement.vain.worked()
            self._count(run, nbytes)
            return None
        self._movement.vain.failed()
        return Reason.NO_SPACE

    def _stored(self, run: list[Fill]) -> list[memoryview] | None:
        """The stored blocks of a run: where they lie in HOST, or read from hotter storage. None if one can not be."""
        found: list[memoryview] = []
        for fill in run:
            arena = self._state.arenas.get(fill.source)
            if arena is not None:
                found.append(arena.view(fill.source_place, fill.copy.nbytes))
                continue
            into = memoryview(mmap.mmap(-1, fill.copy.nbytes))
            name = fill.namespace.namespace_id
            read = BlockRead(DiskHandle(fill.source_place), fill.key, into, namespace_id=name)
            if self._state.storages[fill.source].read([read]) != [ReadStatus.OK]:
                return None
            found.append(into)
        return found

    def _count(self, run: list[Fill], nbytes: int) -> None:
        with self._state.locked() as book:
            book.counters.count(f"{self._word}_blocks_written", len(run))
            book.counters.count(f"{self._word}_bytes_written", nbytes)
            if not self._durable and self._tier is Tier.SSD:
                self._state.writes += 1

    def _know_namespace(self, disk: DiskTier, namespace: Namespace) -> None:
        if self._tier is not Tier.SSD:
            # Idempotent, and asked for each run: only of SSD it is remembered what it knows.
            disk.put_namespace(namespace.spec, namespace.policy, namespace.name)
        elif not namespace.on_disk or not namespace.blocks_by_tier[Tier.SSD]:
            # After a write that failed it may know a namespace without a block, which the disk may forget.
            disk.put_namespace(namespace.spec, namespace.policy, namespace.name)
            with self._state.locked():
                namespace.on_disk = True

    def _make_room(self, disk: DiskTier, run: list[Fill], attempt: int) -> bool:
        """Drop the coldest blocks on SSD and take their space back; False if nothing can go.

        At first what is missing by the ledger; more if that was not it (a floor of free space, dead bytes). The block
        before the run stays: what is written now is not hung under a block that went for it.
        """
        nbytes = sum(fill.copy.nbytes for fill in run)
        missing = nbytes - (disk.capacity_bytes - disk.used_bytes)
        if attempt or missing <= 0:
            missing = nbytes << attempt
        with self._state.locked() as book:
            before = book.index.parent[run[0].slot]
            if before >= 0:
                book.hold(before)
        try:
            if not self._movement.make_room(self._tier, missing, total=True):
                return False
        finally:
            with self._state.locked() as book:
                if before >= 0:
                    book.unhold(before)
        return self._movement.reclaim(self._tier, nbytes)


def extents(fills: Sequence[Fill], blocks_max: int) -> list[list[Fill]]:
    """Cut moves into runs of at most ``blocks_max``, each block the parent of the next, in one namespace."""
    runs: list[list[Fill]] = []
    for fill in fills:
        last = runs[-1] if runs else []
        if last and len(last) < blocks_max and fill.parent == last[-1].key and fill.namespace is last[0].namespace:
            last.append(fill)
        else:
            runs.append([fill])
    return runs


def in_chains(slots: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Slots, given by depth with their parents, reordered so that a child follows its parent wherever possible."""
    first_child: dict[int, int] = {}
    for slot, parent in zip(slots, parents, strict=True):
        first_child.setdefault(parent, slot)
    ordered: dict[int, None] = {}
    for slot in slots:
        walk: int | None = slot
        while walk is not None and walk not in ordered:
            ordered[walk] = None
            walk = first_child.get(walk)
    return list(ordered)
