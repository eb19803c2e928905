"""What keeps one block, and what would become of its copies: for operators. Looks only."""

from __future__ import annotations

import numpy as np

from kvstore.core.types import BlockKey, NamespaceId, Reason, Tier
from kvstore.store.columns.index import NONE
from kvstore.store.moves.space import Space
from kvstore.store.moves.victims import Verdict
from kvstore.store.report import CopyExplained, ExplainReport, Keeper
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.state import State


def reasons_to_stay(book: Book, state: State, slot: int, tier: Tier) -> tuple[str, ...]:
    """Why a copy can not go now, in words of ``CopyExplained``; none if it may."""
    number = copy_number(slot, tier)
    found = []
    if number in book.pins:
        found.append("pinned")
    if slot in book.holds and not book.index.residency[slot] & ~tier.bit & state.readable:
        found.append("held")
    if book.index.kids[tier][slot]:
        found.append("children")
    if number in book.io:
        found.append("io")
    if number in book.fills:
        found.append("filling")
    return tuple(found)


def explain(state: State, space: Space, key: BlockKey, namespace: Namespace, missing: Reason) -> ExplainReport:
    """See ``Store.explain``. ``missing`` is why the block is a miss, where it is one."""
    with state.locked() as book:
        slot = book.resident(key, namespace)
        if slot == NONE:
            found = book.tombstones.get((namespace.namespace_id, key))
            ago = state.clock.now() - found.at if found is not None else 0.0
            return ExplainReport(key=key, reason=missing, seconds_ago=ago)
        index = book.index
        copies = [_copy(book, state, space, slot, tier) for tier in book.tiers if book.has(slot, tier)]
        keepers = tuple(_keepers(book, state, slot, namespace.namespace_id))
        report = ExplainReport(
            key=key, parent=index.parent_key(slot), depth=index.depth[slot], keepers=keepers,
            children=index.children[slot], hits=index.hits[slot],
            idle_seconds=book.uses.idle_seconds(slot, state.clock.now()), copies=tuple(copies),
        )  # fmt: skip
        residency, last_use = np.array(index.residency[: index.top]), np.array(index.last_use[: index.top])
        mine = index.last_use[slot]
    # Counted without the lock: a long table must not hold it.
    for copy in report.copies:
        here = residency & copy.tier.bit != 0
        copy.of, copy.colder = int(here.sum()), int((here & (last_use < mine)).sum())
    return report


def _copy(book: Book, state: State, space: Space, slot: int, tier: Tier) -> CopyExplained:
    kept = reasons_to_stay(book, state, slot, tier)
    if kept == ("children",) and space.may_go_alone(book, slot, tier):
        kept = ()
    verdict = space.judge(book, slot, tier)
    if not kept and verdict is Verdict.KEEP:
        kept = ("held",) if slot in book.holds else ("children",)
    fate = "stays" if kept else "demoted" if verdict is Verdict.DEMOTE else "goes"
    return CopyExplained(tier, book.nbytes(slot, tier), fate, kept)


def _keepers(book: Book, state: State, slot: int, namespace_id: NamespaceId) -> list[Keeper]:
    now, numbers = state.clock.now(), {copy_number(slot, tier) for tier in book.tiers}
    found = [
        Keeper(
            "lease", lease.name, lease.owner.name, lease.owner.pid, max(lease.deadline - now, 0) if lease.timed else 0
        )
        for lease in state.owners.leases.values()
        if slot in lease.holds or not numbers.isdisjoint(lease.pins)
    ]
    found += [
        Keeper("operator", name, "operator", 0, 0.0)
        for name, held in state.owners.operator_pins.items()
        if slot in held.get(namespace_id, ())
    ]
    return found
