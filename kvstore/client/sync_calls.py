"""The calls of a client, typed: each is one line, a flow handed to the driver.

``aio_calls.py`` is made from this file by ``python -m kvstore.tools.twins``: the same calls, awaited. Change this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from kvstore.cache import (
    CommitEntry,
    CommitResult,
    FetchResult,
    MatchResult,
    OpenedNamespace,
    PlanKeys,
    PlanOpened,
    PlanPass,
    ReserveResult,
)
from kvstore.client.flow_put import Staged
from kvstore.client.flows import Flows
from kvstore.client.operations import Operation, Operations
from kvstore.client.payloads import GotBlocks, PutBlocks
from kvstore.client.state import Completion
from kvstore.client.steps import Flow
from kvstore.client.typed import typed
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    BlockKey,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    PlanId,
    ReservationId,
    Target,
    Tier,
)  # fmt: skip
from kvstore.wire.verbs import Verb
from kvstore.wire.verbs.writes import RESERVE

T = TypeVar("T")


class SyncCalls(ABC):
    """Calls of a client that waits."""

    flows: Flows
    operations: Operations
    remote: bool

    @abstractmethod
    def drive(self, flow: Flow[T]) -> T:
        """Carry out a flow."""

    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; without ``strict``, a failure of the cache becomes its fallback."""
        return self.drive(self.flows.run(operation))

    @typed
    def call(self, verb: Verb[T], *arguments: Any) -> T:
        """Any data call by its row of ``kvstore.wire.verbs``, one that was registered at run time, too.

        ``arguments`` as the row's ``pack`` takes them. Fails as all calls do: with ``strict`` it raises, else the
        row's fallback answers.
        """
        return self.run(self.operations.of(verb, *arguments))

    @typed
    def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """See ``Cache``. Remembered, and opened again after a restart of the daemon."""
        return self.run(self.operations.open_namespace(spec, name, policy))

    @typed
    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache``. Without a call, where the daemon lets this host's clients map its index and all is found."""
        return self.drive(self.flows.matches.match(namespace_id, keys))

    @typed
    def reserve(  # noqa: PLR0913  a keyword a field of the request
        self,
        namespace_id: NamespaceId,
        tier: Tier,
        *,
        keys: Sequence[BlockKey] = (),
        count: int = 0,
        durability: Durability | None = None,
        standing: bool = False,
        whole: bool = False,
    ) -> ReserveResult:
        """See ``Cache``."""
        return self.run(self.operations.of(RESERVE, namespace_id, tier, keys, count, durability, standing, whole))

    @typed
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

    @typed
    def abort(self, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache``."""
        if not self.flows.owns(reservation_ids):
            return 0
        return self.run(self.operations.abort(reservation_ids))

    @typed
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

    @typed
    def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache``. A job is either waited for or polled: the result is handed out once."""
        return self.drive(self.flows.wait_job(job_id, timeout_ms))

    @typed
    def poll(self) -> list[Completion]:
        """Jobs that have ended since the last time, without waiting.

        Those of a connection that was lost, and those past ``ClientOptions.job_timeout_s``, have ended as misses.
        """
        return self.drive(self.flows.poll())

    @typed
    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """See ``Cache``."""
        return self.run(self.operations.prefetch(namespace_id, keys, tier))

    @typed
    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache``."""
        return self.run(self.operations.remove(namespace_id, keys))

    @typed
    def flush(self, timeout_ms: int = 30_000) -> int:
        """See ``Cache``."""
        return self.run(self.operations.flush(timeout_ms))

    @typed
    def grant_lease(self, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache``. Lease 0 (a failed cache, not strict) holds nothing; fetching under it misses."""
        return self.run(self.operations.grant_lease(name, ttl_ms))

    @typed
    def renew_lease(self, lease_id: LeaseId) -> int:
        """See ``Cache``. 0 (a failed cache, not strict): it was not renewed."""
        return self.run(self.operations.renew_lease(lease_id))

    @typed
    def hold(self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """See ``Cache``."""
        return self.run(self.operations.hold(lease_id, namespace_id, keys))

    @typed
    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """See ``Cache``."""
        return self.run(self.operations.release(lease_id, namespace_id, keys))

    # ------------------------------------------------------------ whole payloads

    @typed
    def open_plan(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        layers: tuple[int, int] | None = None,
        piece_bytes: int = 4 << 20,
        pieces: int = 4,
        idle_ms: int = 60_000,
    ) -> PlanOpened:
        """See ``Cache``; ``kvstore.client.plan`` reads one."""
        return self.run(self.operations.open_plan(namespace_id, keys, layers, (piece_bytes, pieces), idle_ms))

    @typed
    def extend_plan(self, plan_id: PlanId, keys: Sequence[BlockKey]) -> PlanKeys:
        """See ``Cache``."""
        return self.run(self.operations.extend_plan(plan_id, keys))

    @typed
    def advance_plan(
        self,
        plan_id: PlanId,
        *,
        layers: tuple[int, int] | None = None,
        blocks: Sequence[int] | None = None,
        drop: bool = False,
    ) -> PlanPass:
        """See ``Cache``."""
        return self.run(self.operations.advance_plan(plan_id, layers, blocks, drop))

    @typed
    def close_plan(self, plan_id: PlanId) -> bool:
        """See ``Cache``."""
        return self.run(self.operations.close_plan(plan_id))

    @typed
    def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """Store whole blocks under their keys, parents first.

        Each payload is a contiguous buffer of ``layers * raw_slice_bytes`` bytes, raw whatever the codec, read before
        the call returns. HIT where the block is resident now (``existed`` where it was before) and, if that was asked
        for, durable; BUSY where HOST is full of blocks that wait for storage; else MISS and why. More than the
        session's buffer holds goes through it in windows.
        """
        return self.drive(self.flows.puts.put(namespace_id, blocks, remote=self.remote))

    @typed
    def stage(self, namespace_id: NamespaceId, count: int) -> Staged:
        """Places for up to ``count`` blocks in the session's buffer, to be written there: a put without a copy.

        ``with client.stage(...) as staged``: write ``staged.layer(i, layer)``, then ``put`` with ``staged`` as
        ``payloads``, once. Half the buffer at most. InvalidArgument for a client on another host, which has no buffer.
        """
        return self.drive(self.flows.puts.stage(namespace_id, count, remote=self.remote))

    @typed
    def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        out: object | None = None,
        wait_ms: int = 10_000,
    ) -> GotBlocks:
        """Copy whole blocks out, waiting ``wait_ms`` for those that must come from SSD.

        ``out`` is a writable contiguous buffer of ``len(keys)`` times the larger of raw and coded payload bytes, best
        page-aligned; without it one is made. Missing blocks leave their part of it alone, but for one that went while
        it was copied: it is a miss, whose part of ``out`` may hold anything.
        """
        return self.drive(self.flows.gets.get(namespace_id, keys, out=out, wait_ms=wait_ms, remote=self.remote))
