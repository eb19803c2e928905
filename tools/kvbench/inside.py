"""A store in this process, for figures without a transport: what a match costs while the disk or others are busy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.cache import CommitEntry
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey, NamespaceId, Outcome, Tier
from kvstore.store.embedded import build_store
from kvstore.store.session import Session
from kvstore.tiers.base import DiskTier
from kvstore.tools.kvbench.workload import Chain


@contextmanager
def store_inside(host_bytes: int, disk: DiskTier | None = None) -> Iterator[Session]:
    """A store with one session that has a buffer of 32 MiB; the disk stays the caller's."""
    store = build_store(host_bytes=host_bytes, disk=disk)
    try:
        cache = store.open_session("kvbench", buffer_bytes=32 << 20)
        yield cache
        cache.close()
    finally:
        store.close()


def fill_inside(cache: Session, spec: NamespaceSpec, chain: Chain) -> NamespaceId:
    """Commit a chain of blocks whose bytes nobody reads. Raises Unavailable if the store is too small."""
    namespace = cache.open_namespace(spec).namespace_id
    for begin in range(0, len(chain.keys), 256):
        keys = chain.keys[begin : begin + 256]
        reserved = cache.reserve(namespace, Tier.HOST, keys=keys)
        pairs = zip(reserved.reservation_ids, keys, chain.parents[begin : begin + 256], strict=True)
        done = cache.commit(namespace, [CommitEntry(*pair) for pair in pairs])
        if any(outcome is not Outcome.HIT for outcome in done.outcomes):
            raise Unavailable("the store of this bench is too small for its blocks")
    return namespace


def putter(cache: Session, spec: NamespaceSpec, blocks: int) -> Callable[[], None]:
    """Each call commits a chain of ``blocks``: copies, checksums and evictions beside whoever matches.

    The chains are made before: hashing keys is the clients' work, done in their processes and not in the store's.
    A chain comes around again long after it was evicted, if the store is smaller than 256 MiB.
    """
    namespace = cache.open_namespace(spec).namespace_id
    chains = itertools.cycle([Chain.fresh(spec, blocks, start=n) for n in range((256 << 20) // (blocks << 20))])

    def put() -> None:
        chain = next(chains)
        reserved = cache.reserve(namespace, Tier.HOST, keys=chain.keys)
        pairs = zip(reserved.reservation_ids, chain.keys, chain.parents, reserved.outcomes, strict=True)
        cache.commit(namespace, [CommitEntry(i, k, p) for i, k, p, outcome in pairs if outcome is Outcome.PENDING])

    return put


def matcher(cache: Session, namespace: NamespaceId, keys: Sequence[BlockKey]) -> Callable[[], None]:
    """One match of all keys, checked."""

    def match() -> None:
        if cache.match(namespace, keys).matched != len(keys):
            raise Unavailable("blocks were dropped while they were matched")

    return match


def lookups(keys: Sequence[BlockKey]) -> Callable[[], None]:
    """The least that a match can be in this language: each key found in a dictionary."""
    table = dict.fromkeys(keys, 1)

    def look_up() -> None:
        for key in keys:
            if table.get(key) is None:
                return

    return look_up


@contextmanager
def busy(work: Callable[[], None], threads: int) -> Iterator[list[int]]:
    """Run ``work`` over and over in ``threads`` threads meanwhile; yields a list whose length counts the runs.

    An error in one of them is raised at the end.
    """
    ended = threading.Event()
    runs: list[int] = []
    failed: list[BaseException] = []

    def lane() -> None:
        try:
            while not ended.is_set():
                work()
                runs.append(1)
        except BaseException as error:
            failed.append(error)
            raise

    lanes = [threading.Thread(target=lane, name=f"kvbench-busy-{number}") for number in range(threads)]
    for thread in lanes:
        thread.start()
    try:
        yield runs
    finally:
        ended.set()
        for thread in lanes:
            thread.join()
    if failed:
        raise failed[0]
