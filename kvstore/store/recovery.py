"""The warm start: namespaces and blocks found on SSD go into the index before the store says ready.

A block whose parent is not on SSD is kept under a ghost of its parent: unreachable from the root, so not matched,
until the parent is committed again; if that does not happen it is cold and goes first. Blocks of a namespace whose
spec is not on disk can not be read and are dropped.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter

import numpy as np

from kvstore.core.errors import InvalidArgument, NamespaceMismatch, ResourceExhausted
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec, NamespaceId, Reason, Tier
from kvstore.store.columns.index import DEPTH_MAX, BlockIndex
from kvstore.store.tables.book import Book
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.state import State
from kvstore.tiers.base import DiskTier, RecoveredBlock

log = logging.getLogger(__name__)

BATCH: int = 4096
"""Blocks registered in one locked section."""


def recover(state: State, tier: Tier, disk: DiskTier) -> None:
    """Rebuild the index from one storage. Called once for each, the hottest first, before the store is used."""
    recovered = disk.recover()
    # Which namespaces there are is known once the first block is.
    batch = list(islice(recovered, BATCH))
    known = know_namespaces(state, disk)
    while batch:
        register_blocks(state, batch, known, tier)
        batch = list(islice(recovered, BATCH))
    with state.locked() as book:
        if not set_depths(book.index):
            cut_circles(book)
            set_depths(book.index)
        for namespace in known.values():
            # What the disk holds no block of is known for its name and policy, and may be forgotten.
            namespace.on_disk = namespace.on_disk and namespace.blocks_by_tier[Tier.SSD] > 0
            state.namespaces.leave(namespace)
    give_heap_back()
    report = disk.report
    log.info(
        "%d blocks (%d bytes) are warm on SSD after %.2f s; %d bytes cut, %d blocks quarantined",
        report.blocks, report.bytes, report.seconds, report.cut_bytes, report.quarantined,
    )  # fmt: skip


def know_namespaces(state: State, disk: DiskTier) -> dict[NamespaceId, Namespace]:
    """Open every namespace that is kept on disk, under its policy and name there."""
    known: dict[NamespaceId, Namespace] = {}
    for spec, policy, name in disk.namespaces():
        with state.locked():
            try:
                namespace = _open(state, spec, policy, name)
            except (InvalidArgument, ResourceExhausted) as error:
                log.warning("the blocks of a namespace on SSD are dropped: %s", error)
                continue
            namespace.on_disk = True
            known[namespace.namespace_id] = namespace
            # Nothing of it is in the index yet, and it must not make room for the next one.
            state.namespaces.use(namespace)
    return known


def _open(state: State, spec: NamespaceSpec, policy: NamespacePolicy, name: str) -> Namespace:
    """Open a namespace under the name that it had on disk, or without one if that is another's by now."""
    try:
        return state.namespaces.open(spec, name, policy)[0]
    except NamespaceMismatch as error:
        log.warning("a namespace on SSD loses its name: %s", error)
        return state.namespaces.open(spec, "", policy)[0]


def register_blocks(
    state: State, blocks: list[RecoveredBlock], known: dict[NamespaceId, Namespace], tier: Tier = Tier.SSD
) -> None:
    """Enter blocks found in storage. They are no events: whoever subscribes after a start begins with a list."""
    with state.locked() as book:
        for namespace_id, group in groupby(blocks, key=attrgetter("namespace_id")):
            namespace = known.get(namespace_id)
            if namespace is not None:
                _register_group(book, namespace, group, tier)
                continue
            strangers = [(tier, block.handle, (namespace_id, block.key)) for block in group]
            book.counters.count("recovered_without_namespace", len(strangers))
            book.dropped_handles += strangers


def _register_group(book: Book, namespace: Namespace, blocks: Iterable[RecoveredBlock], tier: Tier) -> None:
    """Enter blocks of one namespace."""
    index, policy = book.index, book.policies[tier]
    known = {Codec.RAW: 0, namespace.codec: namespace.kind_of(namespace.codec, Codec.RAW)}
    chosen = list(blocks)
    # Under a codec that its namespace does not have, a block would be of another size than it is.
    strangers = [block for block in chosen if block.codec not in known]
    if strangers:
        chosen = [block for block in chosen if block.codec in known]
    if not namespace.slots:
        index.know(namespace.number, namespace.sizes)
    done = index.enter(
        namespace.number,
        tier,
        ([block.key for block in chosen], [block.parent for block in chosen]),
        [block.handle for block in chosen],
        bytes([known[block.codec] for block in chosen]),
    )
    # Two copies of one key: the later one goes, being the same bytes.
    strangers += [chosen[position] for position in done.refused]
    book.dropped_handles += [(tier, block.handle, (namespace.namespace_id, block.key)) for block in strangers]
    book.uses.hand_over()
    for slot in done.slots:
        policy.inserted(slot)
    for kind, count in enumerate(done.kinds):
        if count:
            book.account(namespace, tier, kind, count)
    namespace.slots += done.added
    namespace.blocks += done.fresh


def set_depths(index: BlockIndex) -> bool:
    """Right the depths of blocks that were found before their parents, as happens when a parent was used later.

    False, and nothing done, if parents go round in a circle somewhere.
    """
    ancestors = np.array(index.parent[: index.top], dtype=np.int64)
    depths = np.array(index.depth[: index.top], dtype=np.int64)
    has_parent = ancestors >= 0
    right = np.minimum(np.where(has_parent, depths[ancestors] + 1, 0), DEPTH_MAX)
    if np.array_equal(right, depths) and not (depths == DEPTH_MAX).any():
        return True
    # Steps to an ancestor that is twice as far away each time.
    steps = has_parent.astype(np.int64)
    for _ in range(index.top.bit_length() + 1):
        if not has_parent.any():
            break
        steps += np.where(has_parent, steps[ancestors], 0)
        ancestors = np.where(has_parent, ancestors[ancestors], ancestors)
        has_parent = ancestors >= 0
    if has_parent.any():
        return False
    np.frombuffer(index.depth, np.uint16)[: index.top] = np.minimum(steps, DEPTH_MAX)
    return True


def cut_circles(book: Book) -> None:
    """Drop the blocks that are their own ancestors: no root leads to them, and whoever follows parents would not end.

    A client whose keys are no hashes can have named such parents. What hangs under them has a missing parent then.
    """
    index = book.index
    step = np.append(np.array(index.parent[: index.top], dtype=np.int64), index.top)
    # A step from a root, from a ghost that knows no parent, and from the end itself, leads to the end.
    step[:-1][(step[:-1] < 0) | (np.array(index.children[: index.top]) == 0)] = index.top
    for _ in range(index.top.bit_length() + 1):
        step = step[step]
    circle = np.unique(step[step != index.top]).tolist()
    for slot in circle:
        for tier in book.tiers:
            index.kids[tier][index.parent[slot]] -= book.has(slot, tier)
        index.orphan(slot)
    for slot in circle:
        if index.residency[slot]:
            book.drop_everywhere(slot, Reason.DROPPED)
    book.counters.count("recovered_in_circle", len(circle))
    log.error("%d blocks on SSD are their own ancestors and are dropped", len(circle))


def give_heap_back() -> None:
    """Return what growing the index freed (tables half its size) to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
