"""The warm start: namespaces and blocks found on SSD go into the index before the store says ready.

A block whose parent is not on SSD is kept under a ghost of its parent: unreachable from the root, so not matched,
until the parent is committed again; if that does not happen it is cold and goes first. Blocks of a namespace whose
spec is not on disk can not be read and are dropped.
"""

from __future__ import annotations

import logging

from kvstore.core.types import ROOT_PARENT, NamespaceId, Tier
from kvstore.store.book import Book, Copy
from kvstore.store.index import NONE, UNKNOWN
from kvstore.store.lifecycle import Event
from kvstore.store.namespaces import Namespace
from kvstore.store.state import State
from kvstore.tiers.base import DiskTier, RecoveredBlock

log = logging.getLogger(__name__)

BATCH: int = 4096
"""Blocks registered in one locked section."""


def recover(state: State, disk: DiskTier) -> None:
    """Rebuild the index from SSD. Called once, before anything else uses the store."""
    recovered = disk.recover()
    batch: list[RecoveredBlock] = []
    known: dict[NamespaceId, Namespace] | None = None
    for block in recovered:
        if known is None:
            known = know_namespaces(state, disk)
        batch.append(block)
        if len(batch) == BATCH:
            _register(state, batch, known)
            batch = []
    known = know_namespaces(state, disk) if known is None else known
    _register(state, batch, known)
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
            namespace, _ = state.namespaces.open(spec, name, policy)
            namespace.on_disk = True
            known[namespace.namespace_id] = namespace
    return known


def _register(state: State, blocks: list[RecoveredBlock], known: dict[NamespaceId, Namespace]) -> None:
    with state.locked() as book:
        for block in blocks:
            namespace = known.get(block.namespace_id)
            if namespace is None:
                book.counters.count("recovered_without_namespace")
                book.dropped_handles.append(block.handle)
            else:
                _add(book, block, namespace)


def _add(book: Book, block: RecoveredBlock, namespace: Namespace) -> None:
    index = book.index
    if block.parent == ROOT_PARENT:
        parent = NONE
    else:
        parent = index.slots.get(block.parent, NONE)
        if parent == NONE:
            parent = index.add(block.parent, UNKNOWN, namespace.number, 0)
    slot = book.block(block.key, parent, namespace, block.codec)
    if book.has(slot, Tier.SSD):
        # Two copies of one key: the later one counts, the earlier goes.
        book.dropped_handles.append(block.handle)
        return
    copy = Copy(Tier.SSD, 0, place=block.handle)
    copy.advance(Event.FILL)
    book.set_ready(slot, copy)
