"""The store in process: the same interface as the client's, and a factory for embedding and for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.cache import (
    Cache,
    CommitEntry,
    CommitResult,
    FetchResult,
    MatchResult,
    OpenedNamespace,
    ReserveResult,
)  # fmt: skip
from kvstore.core.clock import Clock
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    Area,
    BlockKey,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    ReservationId,
    Target,
    Tier,
)  # fmt: skip
from kvstore.store.config import StoreConfig
from kvstore.store.store import Store
from kvstore.tiers.base import DiskTier
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import HostArena


def build_store(
    config: StoreConfig | None = None,
    *,
    host_bytes: int,
    device_bytes: int = 0,
    disk: DiskTier | None = None,
    clock: Clock | None = None,
) -> Store:
    """A started store with arenas of its own; ``device_bytes`` 0 means no DEVICE tier. The caller closes it."""
    host = HostArena(host_bytes)
    device = MemfdDeviceArena(device_bytes) if device_bytes else None
    store = Store(config or StoreConfig(), host=host, device=device, disk=disk, clock=clock)
    store.start()
    return store


class EmbeddedCache:
    """One session of a store in this process; meets ``api.Cache``. Closing it ends the session, not the store."""

    def __init__(self, store: Store, *, name: str = "embedded", buffer_bytes: int = 64 << 20) -> None:
        self.store = store
        handle = store.open_session(name, buffer_bytes=buffer_bytes, uid=os.getuid(), pid=os.getpid())
        self.session_id = handle.session_id

    def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """See ``Cache.open_namespace``."""
        return self.store.open_namespace(self.session_id, spec, name=name, policy=policy)

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache.match``."""
        return self.store.match(self.session_id, namespace_id, keys)

    def reserve(
        self,
        namespace_id: NamespaceId,
        tier: Tier,
        *,
        keys: Sequence[BlockKey] = (),
        count: int = 0,
        durability: Durability | None = None,
        standing: bool = False,
    ) -> ReserveResult:
        """See ``Cache.reserve``."""
        return self.store.reserve(
            self.session_id, namespace_id, tier, keys=keys, count=count, durability=durability, standing=standing
        )

    def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """See ``Cache.commit``."""
        return self.store.commit(
            self.session_id, namespace_id, entries, token_ids=token_ids, durability=durability, lease_id=lease_id
        )

    def abort(self, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache.abort``."""
        return self.store.abort(self.session_id, reservation_ids)

    def fetch(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        *,
        lease_id: LeaseId,
        layers: tuple[int, int] | None = None,
        wait_ms: int = 0,
    ) -> FetchResult:
        """See ``Cache.fetch``."""
        return self.store.fetch(
            self.session_id, namespace_id, keys, target, lease_id=lease_id, layers=layers, wait_ms=wait_ms
        )

    def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache.wait_job``."""
        return self.store.wait_job(self.session_id, job_id, timeout_ms)

    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """See ``Cache.prefetch``."""
        return self.store.prefetch(self.session_id, namespace_id, keys, tier)

    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache.remove``."""
        return self.store.remove(self.session_id, namespace_id, keys)

    def flush(self, timeout_ms: int = 30_000) -> int:
        """See ``Cache.flush``."""
        return self.store.flush(self.session_id, timeout_ms).blocks

    def grant_lease(self, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache.grant_lease``."""
        return self.store.grant_lease(self.session_id, name, ttl_ms)

    def renew_lease(self, lease_id: LeaseId) -> None:
        """See ``Cache.renew_lease``."""
        self.store.renew_lease(self.session_id, lease_id)

    def hold(self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """See ``Cache.hold``."""
        return self.store.hold(self.session_id, lease_id, namespace_id, keys)

    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """See ``Cache.release``."""
        return self.store.release(self.session_id, lease_id, namespace_id, keys)

    def memory(self, area: Area) -> memoryview:
        """See ``Cache.memory``."""
        return self.store.memory(self.session_id, area)

    def close(self) -> None:
        """See ``Cache.close``."""
        self.store.close_session(self.session_id)


if TYPE_CHECKING:

    def _meets(cache: EmbeddedCache) -> Cache:
        return cache
