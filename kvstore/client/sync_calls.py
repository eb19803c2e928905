"""The calls of ``store.api.Cache`` as one line each: build the operation, run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from kvstore.cache import CommitEntry, CommitResult, FetchResult, MatchResult, OpenedNamespace, ReserveResult
from kvstore.client.operations import Operation, Operations
from kvstore.client.state import ClientState
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import BlockKey, Durability, LeaseId, NamespaceId, Outcome, ReservationId, Target, Tier

T = TypeVar("T")


class SyncCalls(ABC):
    """Calls of a client that waits."""

    operations: Operations
    _state: ClientState

    @abstractmethod
    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation."""

    def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """See ``Cache``. Remembered, and opened again after a restart of the daemon."""
        return self.run(self.operations.open_namespace(spec, name, policy))

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache``."""
        return self.run(self.operations.match(namespace_id, keys))

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
        """See ``Cache``."""
        return self.run(self.operations.reserve(namespace_id, tier, keys, count, durability, standing))

    def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """See ``Cache``."""
        return self.run(self.operations.commit(namespace_id, entries, token_ids, durability, lease_id))

    def abort(self, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache``."""
        if not self._state.present_reservations(reservation_ids):
            return 0
        return self.run(self.operations.abort(reservation_ids))

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
        """See ``Cache``. With ``wait_ms`` 0 it returns at once, and ``poll`` hands out the end of its job."""
        operation = self.operations.fetch(namespace_id, keys, target, lease_id=lease_id, layers=layers, wait_ms=wait_ms)
        return self.run(operation)

    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """See ``Cache``."""
        return self.run(self.operations.prefetch(namespace_id, keys, tier))

    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache``."""
        return self.run(self.operations.remove(namespace_id, keys))

    def flush(self, timeout_ms: int = 30_000) -> int:
        """See ``Cache``."""
        return self.run(self.operations.flush(timeout_ms))

    def grant_lease(self, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache``. Lease 0 (a failed cache, not strict) holds nothing; fetching under it misses."""
        return self.run(self.operations.grant_lease(name, ttl_ms))

    def renew_lease(self, lease_id: LeaseId) -> int:
        """See ``Cache``."""
        return self.run(self.operations.renew_lease(lease_id))

    def hold(self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """See ``Cache``."""
        return self.run(self.operations.hold(lease_id, namespace_id, keys))

    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """See ``Cache``."""
        return self.run(self.operations.release(lease_id, namespace_id, keys))
