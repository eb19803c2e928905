"""Figures of the store alone: memory of the index, speed of a warm start, latency of match. kvbench prints them.

Nothing here is a test: a figure depends on the machine and on what else runs on it.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.cache import CommitEntry
from kvstore.core.keys import parents_of
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import ROOT_PARENT, BlockKey, Codec, NamespaceId, Outcome, Target, Tier
from kvstore.store.embedded import build_store
from kvstore.store.recovery import give_heap_back, register_blocks
from kvstore.store.session import Session
from kvstore.tiers.base import DiskHandle, RecoveredBlock

SPEC = NamespaceSpec(model="bench", dtype="float16", layers=2, kv_heads=1, head_dim=8, block_tokens=16)
CHAIN_BLOCKS = 256
BATCH = 4096


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """``bytes_per_block`` is growth of this process's resident memory; ``load_seconds`` CPU time of registering all."""

    blocks: int
    bytes_per_block: float
    load_seconds: float


def index_figures(blocks: int) -> IndexFigures:
    """Register ``blocks`` blocks as a warm start does, in chains of 256. For a fresh process: it measures growth."""
    store = build_store(host_bytes=4 << 20)
    try:
        state = store._state
        with state.locked():
            namespace, _ = state.namespaces.open(SPEC, "", None)
        known = {namespace.namespace_id: namespace}
        source = _recovered(namespace.namespace_id, blocks)
        gc.collect()
        before, seconds = _resident_bytes(), 0.0
        while batch := list(itertools.islice(source, BATCH)):
            begin = time.thread_time()
            register_blocks(state, batch, known)
            seconds += time.thread_time() - begin
        gc.collect()
        give_heap_back()
        return IndexFigures(blocks, (_resident_bytes() - before) / blocks, seconds)
    finally:
        store.close()


def match_seconds(*, keys: int = 512, repeats: int = 2000, busy_threads: int = 1) -> list[float]:
    """Times of ``repeats`` matches of ``keys`` resident keys, sorted, while threads put, fetch and release others."""
    store = build_store(host_bytes=64 << 20)
    try:
        cache = store.open_session("bench", buffer_bytes=32 << 20)
        namespace_id = cache.open_namespace(SPEC).namespace_id
        chain = _chain(namespace_id, 0, keys)
        _put(cache, namespace_id, chain)
        lease = cache.grant_lease("bench", 600_000)
        cache.hold(lease, namespace_id, chain)
        ended = threading.Event()
        threads = [
            threading.Thread(target=_load, args=(cache, namespace_id, number + 1, ended))
            for number in range(busy_threads)
        ]
        for thread in threads:
            thread.start()
        times = []
        try:
            for _ in range(repeats):
                begin = time.perf_counter()
                cache.match(namespace_id, chain)
                times.append(time.perf_counter() - begin)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        return sorted(times)
    finally:
        store.close()


def _load(cache: Session, namespace_id: NamespaceId, seed: int, ended: threading.Event) -> None:
    """Put 16 blocks, fetch them, release them, over and over, in chains that come back."""
    for number in itertools.count():
        if ended.is_set():
            return
        chain = _chain(namespace_id, seed * 1000 + number % 64, 16)
        _put(cache, namespace_id, chain)
        lease = cache.grant_lease("load", 60_000)
        cache.fetch(namespace_id, chain, Target.IN_PLACE, lease_id=lease)
        cache.release(lease)


def _put(cache: Session, namespace_id: NamespaceId, chain: list[BlockKey]) -> None:
    found = cache.reserve(namespace_id, Tier.HOST, keys=chain)
    rows = zip(found.outcomes, found.reservation_ids, chain, parents_of(chain), strict=True)
    entries = [CommitEntry(number, key, parent) for outcome, number, key, parent in rows if outcome is Outcome.PENDING]
    cache.commit(namespace_id, entries)


def _chain(namespace_id: NamespaceId, seed: int, blocks: int) -> list[BlockKey]:
    """Keys that need not be hashes of tokens, since nobody checks them here."""
    return [
        BlockKey(seed.to_bytes(8, "big") + number.to_bytes(8, "big") + namespace_id[:16]) for number in range(blocks)
    ]


def _recovered(namespace_id: NamespaceId, blocks: int) -> Iterator[RecoveredBlock]:
    parent = ROOT_PARENT
    for number in range(blocks):
        key = BlockKey(os.urandom(32))
        above = ROOT_PARENT if number % CHAIN_BLOCKS == 0 else parent
        yield RecoveredBlock(DiskHandle(number), namespace_id, key, above, Codec.RAW, number)
        parent = key


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
