"""put, get and get in place of the asyncio client: the steps of ``payloads`` and ``streaming``, copies in threads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from kvstore.cache import CommitResult, FetchResult, ReserveResult
from kvstore.client.copying import aligned_buffer, copy_all
from kvstore.client.operations import commit_result, missed
from kvstore.client.payloads import (
    BlockView,
    GetPlan,
    GotBlocks,
    Memory,
    PutBlocks,
    PutPlan,
    joined,
    part_of,
    part_result,
    pending_of,
    put_failed,
    slot_bytes,
    views_of,
)
from kvstore.client.standing import Out, StandingPlaces, answered, claimed, take_out
from kvstore.client.state import GENERATION_SHIFT
from kvstore.client.streaming import (
    WRITE_PART_BYTES,
    Assembler,
    parse_chunk,
    read_request,
    write_messages,
    write_planes,
)
from kvstore.client.transfer import LEASES_IDLE_MAX, STREAM_SECONDS_PER_GIB, OwnLease, known_namespace, layout_of
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockKey, NamespaceId, Target, Tier
from kvstore.v1 import cache_pb2

if TYPE_CHECKING:
    from kvstore.client.aio import AsyncClient


class AsyncTransfer:
    """put and get of one asyncio client; used on its loop's thread only."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._idle: deque[OwnLease] = deque()
        self._standing = StandingPlaces()

    async def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """Store blocks; see ``Client.put``."""
        layout = layout_of(self._client.state, namespace_id)
        client, results = self._client, []
        if client.remote:
            plan = PutPlan.of(layout, blocks, WRITE_PART_BYTES)
            for part in plan.parts:
                lost = partial(put_failed, part.stop - part.start)
                results.append(await client.guarded("Cache/Write", self._upload(namespace_id, plan, part), lost))
            return joined(results)
        plan = PutPlan.of(layout, blocks)
        under_way: asyncio.Task[CommitResult] | None = None
        out: Out = {}
        try:
            for batch, parts in plan.batches(client.options.buffer_bytes):
                reserved = await self._claim(namespace_id, batch.stop - batch.start, out)
                for part in parts:
                    mine = part_of(reserved, part.start - batch.start, part.stop - batch.start)
                    written = await client.guarded("write", self._write(plan, part, mine), lambda: False)
                    if under_way is not None:
                        results.append(await under_way)
                    commit = self._commit(namespace_id, plan, part, mine, out) if written else self._lost(part)
                    under_way = asyncio.create_task(commit)
            if under_way is not None:
                results.append(await under_way)
        except KVStoreError:
            await self._undo(under_way, out)
            raise
        return joined(results)

    async def _claim(self, namespace_id: NamespaceId, count: int, out: Out) -> ReserveResult:
        """Places for ``count`` blocks, entered in ``out``: idle ones, and new ones for what is missing."""
        client = self._client
        try:
            _, generation = await client.connection()
        except KVStoreError as error:
            reserve = client.operations.reserve(namespace_id, Tier.HOST, (), count)
            return client.fall_back(reserve.method, error, reserve.fallback)
        places, busy = self._standing.take(generation, namespace_id, count), None
        for tries_left in (1, 0):
            if len(places) == count:
                break
            reserved = await client.reserve(namespace_id, Tier.HOST, count=count - len(places), standing=True)
            places, busy = places + answered(reserved), reserved.busy
            spare = self._standing.spare(namespace_id) if busy is not None and tries_left else []
            if not spare:
                break
            await client.abort(spare)
        return claimed(take_out(out, places, client.generation), count, busy)

    async def _undo(self, under_way: asyncio.Task[CommitResult] | None, out: Out) -> None:
        """Take the reply of a commit that was sent, and give back what was not committed."""
        if under_way is not None:
            await asyncio.gather(under_way, return_exceptions=True)
        if out:
            with contextlib.suppress(KVStoreError):
                await self._client.abort(list(out))

    async def _write(self, plan: PutPlan, part: slice, reserved: ReserveResult) -> bool:
        pending = pending_of(reserved)
        if pending:
            generation = reserved.reservation_ids[pending[0]] >> GENERATION_SHIFT
            copies = plan.writes(part, reserved, self._client.memory_at(generation))
            await asyncio.to_thread(copy_all, copies, self._client.options.copy_threads)
        return True

    async def _commit(
        self, namespace_id: NamespaceId, plan: PutPlan, part: slice, reserved: ReserveResult, out: Out
    ) -> CommitResult:
        entries = plan.entries(part, reserved)
        if not entries:
            return part_result(reserved, None)
        tokens = plan.tokens([part.start + i for i in pending_of(reserved)])
        committed = await self._client.commit(
            namespace_id, entries, token_ids=tokens, durability=plan.blocks.durability
        )
        places = [out.pop(entry.reservation_id) for entry in entries]
        surplus = self._standing.settle(
            namespace_id, places, committed, plan.places_max(self._client.options.buffer_bytes)
        )
        if surplus:
            self._client.post(self._client.operations.abort(surplus))
        return part_result(reserved, committed)

    async def _lost(self, part: slice) -> CommitResult:
        return put_failed(part.stop - part.start)

    async def _upload(self, namespace_id: NamespaceId, plan: PutPlan, part: slice) -> CommitResult:
        connection, _ = await self._client.connection()
        size = sum(source.nbytes for source in plan.sources[part])
        planes = write_planes(known_namespace(self._client.state, namespace_id), self._client.options.lossless)
        messages = _from_threads(write_messages(namespace_id, plan, part, planes))
        reply = await connection.upload("kvstore.v1.Cache/Write", messages, self._stream_timeout(size))
        return commit_result(cache_pb2.CommitResponse.FromString(reply))

    async def get(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, out: object | None, wait_ms: int
    ) -> GotBlocks:
        """Copy blocks out; see ``Client.get``."""
        layout = layout_of(self._client.state, namespace_id)
        plan = GetPlan.of(layout, len(keys), aligned_buffer(slot_bytes(layout) * len(keys)) if out is None else out)
        if self._client.remote:
            lost = Assembler(plan, len(keys)).result
            return await self._client.guarded("Cache/Read", self._download(namespace_id, keys, plan), lost)
        async with self._pinned(namespace_id, keys, wait_ms) as (fetched, memory):
            copies, got = plan.reads(fetched, memory)
            await asyncio.to_thread(copy_all, copies, self._client.options.copy_threads)
        return got

    async def _download(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], plan: GetPlan) -> GotBlocks:
        connection, _ = await self._client.connection()
        assembler = Assembler(plan, len(keys))
        timeout_s = self._stream_timeout(plan.destination.nbytes)
        request = read_request(namespace_id, keys, self._client.options.lossless)
        async for message in connection.stream("kvstore.v1.Cache/Read", request, timeout_s):
            chunk = parse_chunk(message)
            if chunk.HasField("coded"):
                await asyncio.to_thread(assembler.take, chunk)
            else:
                assembler.take(chunk)
        return assembler.result()

    @asynccontextmanager
    async def in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int
    ) -> AsyncIterator[tuple[BlockView | None, ...]]:
        """Blocks where they lie, pinned until the ``with`` ends; see ``Client.get_in_place``."""
        layout = layout_of(self._client.state, namespace_id)
        async with self._pinned(namespace_id, keys, wait_ms) as (fetched, memory):
            yield views_of(fetched, layout, memory)

    @asynccontextmanager
    async def _pinned(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], wait_ms: int
    ) -> AsyncIterator[tuple[FetchResult, Memory]]:
        lease = await self._take_lease()
        fetched = await self._client.fetch(
            namespace_id, keys, Target.IN_PLACE, lease_id=lease.lease_id, wait_ms=wait_ms
        )
        memory: Memory = self._client.memory
        if any(fetched.places):
            try:
                memory = self._client.memory_at(lease.generation)
            except Unavailable as error:
                fetched = self._client.fall_back("Cache/Fetch", error, partial(missed, len(keys)))
        try:
            yield fetched, memory
        finally:
            self._give_back(lease, namespace_id, keys if any(fetched.places) else ())

    async def _take_lease(self) -> OwnLease:
        client, now = self._client, time.monotonic()
        lease = self._idle.pop() if self._idle else None
        if lease is not None and lease.generation == client.generation:
            if now - lease.renewed < client.options.lease_ttl_ms / 4000:
                return lease
            try:
                await client.attempt(client.operations.renew_lease(lease.lease_id))
                lease.renewed = now
                return lease
            except KVStoreError as error:
                client.fall_back("Leases/RenewLease", error, lambda: None)
        lease_id = await client.grant_lease(f"{client.options.name} get", client.options.lease_ttl_ms)
        return OwnLease(lease_id, client.generation, now)

    def _give_back(self, lease: OwnLease, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        client = self._client
        if not lease.lease_id or lease.generation != client.generation:
            return
        if keys:
            client.post(client.operations.release(lease.lease_id, namespace_id, keys))
        if len(self._idle) < LEASES_IDLE_MAX:
            self._idle.append(lease)
        else:
            client.post(client.operations.release(lease.lease_id, None, ()))

    def _stream_timeout(self, nbytes: int) -> float:
        return self._client.options.timeout_s + nbytes / (1 << 30) * STREAM_SECONDS_PER_GIB


async def _from_threads(messages: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Messages that are made in threads, one after another: coding and checksums keep the loop for milliseconds."""
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message
