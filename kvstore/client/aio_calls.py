"""The calls of an asyncio client, typed.

Made from ``sync_calls.py`` by ``python -m kvstore.tools.twins``: change that one.
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


class AsyncCalls(ABC):
    """Calls of a client that is awaited."""

    flows: Flows
    operations: Operations
    remote: bool

    @abstractmethod
    async def drive(self, flow: Flow[T]) -> T:
        """Carry out a flow."""

    async def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; without ``strict``, a failure of the cache becomes its fallback."""
        return await self.drive(self.flows.run(operation))

    @typed
    async def call(self, verb: Verb[T], *arguments: Any) -> T:
        """Any data call by its row of ``kvstore.wire.verbs``, one that was registered at run time, too.

        ``arguments`` as the row's ``pack`` takes them. Fails as all calls do: with ``strict`` it raises, else the
        row's fallback answers.
        """
        return await self.run(self.operations.of(verb, *arguments))

    @typed
    async def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """See ``Cache``. Remembered, and opened again after a restart of the daemon."""
        return await self.run(self.operations.open_namespace(spec, name, policy))

    @typed
    async def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache``. Without a call, where the daemon lets this host's clients map its index and all is found."""
        return await self.drive(self.flows.matches.match(namespace_id, keys))

    @typed
    async def reserve(  # noqa: PLR0913  a keyword a field of the request
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
        return await self.run(self.operations.of(RESERVE, namespace_id, tier, keys, count, durability, standing, whole))

    @typed
    async def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """See ``Cache``."""
        return await self.run(self.operations.commit(namespace_id, entries, token_ids, durability, lease_id))

    @typed
    async def abort(self, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache``."""
        if not self.flows.owns(reservation_ids):
            return 0
        return await self.run(self.operations.abort(reservation_ids))

    @typed
    async def fetch(
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
        return await self.run(operation)

    @typed
    async def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache``. A job is either waited for or polled: the result is handed out once."""
        return await self.drive(self.flows.wait_job(job_id, timeout_ms))

    @typed
    async def poll(self) -> list[Completion]:
        """Jobs that have ended since the last time, without waiting.

        Those of a connection that was lost, and those past ``ClientOptions.job_timeout_s``, have ended as misses.
        """
        return await self.drive(self.flows.poll())

    @typed
    async def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """See ``Cache``."""
        return await self.run(self.operations.prefetch(namespace_id, keys, tier))

    @typed
    async def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache``."""
        return await self.run(self.operations.remove(namespace_id, keys))

    @typed
    async def flush(self, timeout_ms: int = 30_000) -> int:
        """See ``Cache``."""
        return await self.run(self.operations.flush(timeout_ms))

    @typed
    async def grant_lease(self, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache``. Lease 0 (a failed cache, not strict) holds nothing; fetching under it misses."""
        return await self.run(self.operations.grant_lease(name, ttl_ms))

    @typed
    async def renew_lease(self, lease_id: LeaseId) -> int:
        """See ``Cache``. 0 (a failed cache, not strict): it was not renewed."""
        return await self.run(self.operations.renew_lease(lease_id))

    @typed
    async def hold(self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """See ``Cache``."""
        return await self.run(self.operations.hold(lease_id, namespace_id, keys))

    @typed
    async def release(
        self, lease_id: LeaseId, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()
    ) -> int:
        """See ``Cache``."""
        return await self.run(self.operations.release(lease_id, namespace_id, keys))

    # ------------------------------------------------------------ whole payloads

    @typed
    async def open_plan(
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
        return await self.run(self.operations.open_plan(namespace_id, keys, layers, (piece_bytes, pieces), idle_ms))

    @typed
    async def extend_plan(self, plan_id: PlanId, keys: Sequence[BlockKey]) -> PlanKeys:
        """See ``Cache``."""
        return await self.run(self.operations.extend_plan(plan_id, keys))

    @typed
    async def advance_plan(
        self,
        plan_id: PlanId,
        *,
        layers: tuple[int, int] | None = None,
        blocks: Sequence[int] | None = None,
        drop: bool = False,
    ) -> PlanPass:
        """See ``Cache``."""
        return await self.run(self.operations.advance_plan(plan_id, layers, blocks, drop))

    @typed
    async def close_plan(self, plan_id: PlanId) -> bool:
        """See ``Cache``."""
        return await self.run(self.operations.close_plan(plan_id))

    @typed
    async def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """Store whole blocks under their keys, parents first.

        Each payload is a contiguous buffer of ``layers * raw_slice_bytes`` bytes, raw whatever the codec, read before
        the call returns. HIT where the block is resident now (``existed`` where it was before) and, if that was asked
        for, durable; BUSY where HOST is full of blocks that wait for storage; else MISS and why. More than the
        session's buffer holds goes through it in windows.
        """
        return await self.drive(self.flows.puts.put(namespace_id, blocks, remote=self.remote))

    @typed
    async def stage(self, namespace_id: NamespaceId, count: int) -> Staged:
        """Places for up to ``count`` blocks in the session's buffer, to be written there: a put without a copy.

        ``with client.stage(...) as staged``: write ``staged.layer(i, layer)``, then ``put`` with ``staged`` as
        ``payloads``, once. Half the buffer at most. InvalidArgument for a client on another host, which has no buffer.
        """
        return await self.drive(self.flows.puts.stage(namespace_id, count, remote=self.remote))

    @typed
    async def get(
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
        return await self.drive(self.flows.gets.get(namespace_id, keys, out=out, wait_ms=wait_ms, remote=self.remote))
