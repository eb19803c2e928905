"""put, get and get in place of the synchronous client.

Same-host bytes cross no socket: put writes into the session's buffer while the daemon takes in the part before,
get copies from the arenas. Remote clients use the streams Read and Write.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kvstore.cache import CommitResult, FetchResult, ReserveResult
from kvstore.client.connection import StreamConnection
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
from kvstore.client.state import GENERATION_SHIFT, ClientState, KnownNamespace
from kvstore.client.streaming import (
    WRITE_PART_BYTES,
    Assembler,
    parse_chunk,
    read_request,
    write_messages,
    write_planes,
)
from kvstore.core.errors import InvalidArgument, KVStoreError, UnknownNamespace
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import BlockKey, LeaseId, NamespaceId, Outcome, Target, Tier
from kvstore.v1 import cache_pb2

if TYPE_CHECKING:
    from kvstore.client.sync import Client

T = TypeVar("T")

LEASES_IDLE_MAX: Final = 16
STREAM_SECONDS_PER_GIB: Final = 60.0
"""Deadline of a stream beyond that of a call: the slowest network that is still worth more than recomputing."""


@dataclass(slots=True)
class OwnLease:
    """A lease that the client granted itself for a get."""

    lease_id: LeaseId
    generation: int
    renewed: float


class Transfer:
    """put and get of one client. The lock guards the idle leases."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._idle: deque[OwnLease] = deque()
        self._standing = StandingPlaces()

    # ------------------------------------------------------------ put

    def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """Store blocks; see ``Client.put``."""
        layout = layout_of(self._client.state, namespace_id)
        if self._client.remote:
            return self._upload(namespace_id, PutPlan.of(layout, blocks, WRITE_PART_BYTES))
        plan = PutPlan.of(layout, blocks)
        results: list[CommitResult] = []
        under_way: Callable[[], CommitResult] | None = None
        out: Out = {}
        try:
            for batch, parts in plan.batches(self._client.options.buffer_bytes):
                reserved = self._claim(namespace_id, batch.stop - batch.start, out)
                for part in parts:
                    mine = part_of(reserved, part.start - batch.start, part.stop - batch.start)
                    written = self._guarded("write", partial(self._write, plan, part, mine), lambda: False)
                    if under_way is not None:
                        begun, under_way = under_way, None
                        results.append(begun())
                    under_way = self._commit(namespace_id, plan, part, mine, out) if written else partial(_lost, part)
            if under_way is not None:
                begun, under_way = under_way, None
                results.append(begun())
        except KVStoreError:
            self._undo(under_way, out)
            raise
        return joined(results)

    def _claim(self, namespace_id: NamespaceId, count: int, out: Out) -> ReserveResult:
        """Places for ``count`` blocks, entered in ``out``: idle ones, and new ones for what is missing."""
        client = self._client
        try:
            _, generation = client.connection()
        except KVStoreError as error:
            reserve = client.operations.reserve(namespace_id, Tier.HOST, (), count)
            return client.fall_back(reserve.method, error, reserve.fallback)
        places, busy = self._standing.take(generation, namespace_id, count), None
        for tries_left in (1, 0):
            if len(places) == count:
                break
            reserved = client.reserve(namespace_id, Tier.HOST, count=count - len(places), standing=True)
            places, busy = places + answered(reserved), reserved.busy
            spare = self._standing.spare(namespace_id) if busy is not None and tries_left else []
            if not spare:
                break
            client.abort(spare)
        return claimed(take_out(out, places, client.generation), count, busy)

    def _undo(self, under_way: Callable[[], CommitResult] | None, out: Out) -> None:
        """Take the reply of a commit that was sent, and give back what was not committed."""
        if under_way is not None:
            with contextlib.suppress(KVStoreError):
                under_way()
        if out:
            with contextlib.suppress(KVStoreError):
                self._client.abort(list(out))

    def _write(self, plan: PutPlan, part: slice, reserved: ReserveResult) -> bool:
        pending = pending_of(reserved)
        if pending:
            generation = reserved.reservation_ids[pending[0]] >> GENERATION_SHIFT
            copies = plan.writes(part, reserved, self._client.memory_at(generation))
            copy_all(copies, self._client.options.copy_threads)
        return True

    def _commit(
        self, namespace_id: NamespaceId, plan: PutPlan, part: slice, reserved: ReserveResult, out: Out
    ) -> Callable[[], CommitResult]:
        """Send the commit of a part; the function waits for it."""
        entries = plan.entries(part, reserved)
        if not entries:
            return lambda: part_result(reserved, None)
        tokens = plan.tokens([part.start + i for i, o in enumerate(reserved.outcomes) if o is Outcome.PENDING])
        operation = self._client.operations.commit(namespace_id, entries, tokens, plan.blocks.durability, None)
        finish = self._client.begin(operation)

        def end() -> CommitResult:
            committed = finish()
            places = [out.pop(entry.reservation_id) for entry in entries]
            keep = plan.places_max(self._client.options.buffer_bytes)
            surplus = self._standing.settle(namespace_id, places, committed, keep)
            if surplus:
                self._client.post(self._client.operations.abort(surplus))
            return part_result(reserved, committed)

        return end

    def _upload(self, namespace_id: NamespaceId, plan: PutPlan) -> CommitResult:
        def upload(part: slice) -> CommitResult:
            connection = self._streams()
            planes = write_planes(known_namespace(self._client.state, namespace_id), self._client.options.lossless)
            messages = write_messages(namespace_id, plan, part, planes)
            size = sum(source.nbytes for source in plan.sources[part])
            reply = connection.upload("kvstore.v1.Cache/Write", messages, self._stream_timeout(size))
            return commit_result(cache_pb2.CommitResponse.FromString(reply))

        return joined(
            [self._guarded("Cache/Write", partial(upload, part), partial(_lost, part)) for part in plan.parts]
        )

    # ------------------------------------------------------------ get

    def get(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, out: object | None = None, wait_ms: int
    ) -> GotBlocks:
        """Copy blocks out; see ``Client.get``."""
        layout = layout_of(self._client.state, namespace_id)
        plan = GetPlan.of(layout, len(keys), aligned_buffer(slot_bytes(layout) * len(keys)) if out is None else out)
        if self._client.remote:
            return self._download(namespace_id, keys, plan)
        with self._pinned(namespace_id, keys, wait_ms) as (fetched, memory):
            copies, got = plan.reads(fetched, memory)
            copy_all(copies, self._client.options.copy_threads)
        return got

    def _download(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], plan: GetPlan) -> GotBlocks:
        def download() -> GotBlocks:
            assembler = Assembler(plan, len(keys))
            timeout_s = self._stream_timeout(plan.destination.nbytes)
            request = read_request(namespace_id, keys, self._client.options.lossless)
            for message in self._streams().stream("kvstore.v1.Cache/Read", request, timeout_s):
                assembler.take(parse_chunk(message))
            return assembler.result()

        return self._guarded("Cache/Read", download, lambda: Assembler(plan, len(keys)).result())

    @contextmanager
    def in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int
    ) -> Iterator[tuple[BlockView | None, ...]]:
        """Blocks where they lie, pinned until the ``with`` ends; see ``Client.get_in_place``."""
        layout = layout_of(self._client.state, namespace_id)
        with self._pinned(namespace_id, keys, wait_ms) as (fetched, memory):
            yield views_of(fetched, layout, memory)

    @contextmanager
    def _pinned(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], wait_ms: int
    ) -> Iterator[tuple[FetchResult, Memory]]:
        """Fetch in place under a lease that no other thread uses, and drop the pins at the end."""
        lease = self._take_lease()
        fetched = self._client.fetch(namespace_id, keys, Target.IN_PLACE, lease_id=lease.lease_id, wait_ms=wait_ms)
        memory: Memory = self._client.memory
        if any(fetched.places):
            try:
                memory = self._client.memory_at(lease.generation)
            except KVStoreError as error:
                fetched = self._client.fall_back("Cache/Fetch", error, partial(missed, len(keys)))
        try:
            yield fetched, memory
        finally:
            self._give_back(lease, namespace_id, keys if any(fetched.places) else ())

    def _streams(self) -> StreamConnection:
        connection, _ = self._client.connection()
        if not hasattr(connection, "stream"):
            raise InvalidArgument("target", "a session socket", "a gRPC address, since streams are gRPC's")
        return cast(StreamConnection, connection)

    def _stream_timeout(self, nbytes: int) -> float:
        return self._client.options.timeout_s + nbytes / (1 << 30) * STREAM_SECONDS_PER_GIB

    def _guarded(self, method: str, call: Callable[[], T], fallback: Callable[[], T]) -> T:
        try:
            return call()
        except KVStoreError as error:
            return self._client.fall_back(method, error, fallback)

    # ------------------------------------------------------------ leases of its own

    def _take_lease(self) -> OwnLease:
        """An idle lease of the present connection, renewed in time, or a new one."""
        now = time.monotonic()
        with self._lock:
            lease = self._idle.pop() if self._idle else None
        quarter_s = self._client.options.lease_ttl_ms / 4000
        if lease is not None and lease.generation == self._client.generation:
            if now - lease.renewed < quarter_s:
                return lease
            try:
                self._client.attempt(self._client.operations.renew_lease(lease.lease_id))
                lease.renewed = now
                return lease
            except KVStoreError as error:
                self._client.note("Leases/RenewLease", error)
        lease_id = self._client.grant_lease(f"{self._client.options.name} get", self._client.options.lease_ttl_ms)
        return OwnLease(lease_id, self._client.generation, now)

    def _give_back(self, lease: OwnLease, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Drop the pins without waiting for the answer, and keep the lease for the next get."""
        if not lease.lease_id or lease.generation != self._client.generation:
            return
        if keys:
            self._client.post(self._client.operations.release(lease.lease_id, namespace_id, keys))
        with self._lock:
            keep = len(self._idle) < LEASES_IDLE_MAX
            if keep:
                self._idle.append(lease)
        if not keep:
            self._client.post(self._client.operations.release(lease.lease_id, None, ()))


def _lost(part: slice) -> CommitResult:
    return put_failed(part.stop - part.start)


def layout_of(state: ClientState, namespace_id: NamespaceId) -> BlockLayout:
    """Layout of a namespace that this client opened. Raises UnknownNamespace."""
    return known_namespace(state, namespace_id).layout


def known_namespace(state: ClientState, namespace_id: NamespaceId) -> KnownNamespace:
    """A namespace that this client opened. Raises UnknownNamespace."""
    known = state.namespace(namespace_id)
    if known is None:
        raise UnknownNamespace(
            f"namespace {namespace_id.hex()[:16]} was not opened by this client",
            field="namespace_id",
            value=namespace_id.hex(),
            expected="an id that open_namespace of this client answered",
        )
    return known
