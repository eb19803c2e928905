"""Whole payloads in and out: put, get, and get in place, on top of the two-phase calls.

A payload is a block's slices without padding, layer by layer: ``layers * slice_bytes`` bytes. Same-host bytes
cross no socket: put writes into the session's buffer while the daemon takes in the part before, get copies
from the arenas. Remote clients use the streams Read and Write.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.client import operations
from kvstore.client.copying import Bytes, Copier, Run, aligned_buffer, as_bytes, slices_view
from kvstore.core.errors import InvalidArgument, KVStoreError, UnknownLease, UnknownNamespace
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import (
    Area,
    BlockKey,
    Codec,
    Durability,
    LeaseId,
    NamespaceId,
    Outcome,
    Place,
    Reason,
    ReservationId,
    Target,
    Tier,
)
from kvstore.store.api import CommitEntry, CommitResult, FetchResult

if TYPE_CHECKING:
    from kvstore.client.sync import Client

PUT_PART_BYTES: Final = 4 << 20
"""Bytes that put writes before it has the daemon take them in: large enough that a call is small beside it, small
enough that writing and taking in overlap."""

_LEASES_IDLE_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """Blocks to store: ``payloads[i]`` belongs to ``keys[i]``, whose parent is ``parents[i]``; parents come first."""

    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    payloads: Sequence[object]
    token_ids: Sequence[int] = ()
    durability: Durability | None = None


@dataclass(frozen=True, slots=True)
class GotBlocks:
    """What ``get`` copied out. ``payloads[i]`` is a part of ``buffer``, None where the outcome is not HIT.

    A payload has the slices under ``codecs[i]`` without padding. The buffer is the caller's.
    """

    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    payloads: tuple[memoryview | None, ...]
    codecs: tuple[Codec, ...]
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block where it lies, valid inside the ``with``: slice ``l`` begins at ``offset + l * stride`` of it."""

    memory: memoryview
    offset: int
    stride: int
    slice_bytes: int
    layers: int
    codec: Codec

    def slice(self, layer: int) -> memoryview:
        """Bytes of one layer."""
        if not 0 <= layer < self.layers:
            raise InvalidArgument("layer", layer, f"0 to {self.layers - 1}")
        begin = self.offset + layer * self.stride
        return self.memory[begin : begin + self.slice_bytes]


@dataclass(slots=True)
class _Lease:
    lease_id: LeaseId
    generation: int
    renewed: float


class Transfer:
    """put and get of one client. The lock guards the idle leases."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._idle: deque[_Lease] = deque()
        self._copier: Copier | None = None

    # ------------------------------------------------------------ put

    def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """Store blocks; see ``Client.put``."""
        layout = self.layout(namespace_id)
        count = len(blocks.keys)
        for field, size in (("parents", len(blocks.parents)), ("payloads", len(blocks.payloads))):
            if size != count:
                raise InvalidArgument(field, f"{size} entries", f"{count} entries, one for each of keys")
        tokens = len(blocks.token_ids) // count if count else 0
        size = layout.layers * layout.slice_bytes
        sources = [as_bytes(f"payloads[{i}]", payload, size) for i, payload in enumerate(blocks.payloads)]
        step = max(1, PUT_PART_BYTES // layout.stored_bytes)
        parts = [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
        results: list[CommitResult] = []
        under_way: _Commit | None = None
        for part in parts:
            keys = blocks.keys[part]
            written = self._write(namespace_id, keys, sources[part], layout)
            if under_way is not None:
                results.append(under_way.wait())
            under_way = _Commit(self._client, namespace_id, blocks, part, written, tokens)
        if under_way is not None:
            results.append(under_way.wait())
        return _joined(results)

    def _write(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], sources: Sequence[Bytes], layout: BlockLayout
    ) -> _Written:
        reserved = self._client.reserve(namespace_id, Tier.HOST, keys=keys)
        pending = [i for i, outcome in enumerate(reserved.outcomes) if outcome is Outcome.PENDING]
        if pending:
            buffer = np.frombuffer(self._client.memory(Area.BUFFER), np.uint8)
            self.copier.copy([(sources[i], slices_view(buffer, _run(reserved.places[i], layout))) for i in pending])
        return _Written(reserved.outcomes, reserved.reservation_ids, tuple(pending))

    # ------------------------------------------------------------ get

    def get(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, out: object | None = None, wait_ms: int
    ) -> GotBlocks:
        """Copy blocks out; see ``Client.get``."""
        layout = self.layout(namespace_id)
        slot = layout.layers * max(layout.raw_slice_bytes, layout.slice_bytes)
        if out is None:
            out = aligned_buffer(slot * len(keys))
        destination = as_bytes("out", out, slot * len(keys))
        if not destination.flags.writeable:
            raise InvalidArgument("out", "read-only", "a writable buffer")
        lease = self._take_lease()
        fetched = self._fetch(namespace_id, keys, lease, wait_ms)
        payloads: list[memoryview | None] = [None] * len(keys)
        codecs = [Codec.RAW] * len(keys)
        pairs = []
        for i, place in enumerate(fetched.places):
            if place is None or fetched.outcomes[i] is not Outcome.HIT:
                continue
            run = _run(place, layout)
            memory = np.frombuffer(self._client.memory(place.area), np.uint8)
            target = destination[i * slot : i * slot + run.packed_bytes]
            source = slices_view(memory, run)
            pairs.append((source, target.reshape(source.shape)))
            payloads[i], codecs[i] = target.data, place.codec
        self.copier.copy(pairs)
        self._give_back(lease, namespace_id, keys if pairs else ())
        return GotBlocks(fetched.outcomes, fetched.reasons, tuple(payloads), tuple(codecs), destination.data)

    @contextmanager
    def in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int
    ) -> Iterator[tuple[BlockView | None, ...]]:
        """Blocks where they lie, pinned until the ``with`` ends; see ``Client.get_in_place``."""
        layout = self.layout(namespace_id)
        lease = self._take_lease()
        fetched = self._fetch(namespace_id, keys, lease, wait_ms)
        try:
            yield tuple(
                None if place is None or outcome is not Outcome.HIT else self._view(place, layout)
                for outcome, place in zip(fetched.outcomes, fetched.places, strict=True)
            )
        finally:
            self._give_back(lease, namespace_id, keys if Outcome.HIT in fetched.outcomes else ())

    def _view(self, place: Place, layout: BlockLayout) -> BlockView:
        run = _run(place, layout)
        memory = self._client.memory(place.area)
        return BlockView(memory, run.offset, run.stride, run.slice_bytes, run.layers, place.codec)

    def _fetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], lease: _Lease, wait_ms: int) -> FetchResult:
        fetched = self._client.fetch(namespace_id, keys, Target.IN_PLACE, lease_id=lease.lease_id, wait_ms=wait_ms)
        if self._client.generation != lease.generation and lease.lease_id:
            # The connection changed under the call: the places are of a session that is gone.
            return operations.missed(len(keys))
        return fetched

    # ------------------------------------------------------------ leases of its own

    def _take_lease(self) -> _Lease:
        """A lease that no other thread uses meanwhile, since releasing keys of a lease drops every pin on them."""
        now = time.monotonic()
        with self._lock:
            lease = self._idle.pop() if self._idle else None
        ttl_s = self._client.options.lease_ttl_ms / 1000
        if lease is not None and lease.generation == self._client.generation:
            if now - lease.renewed < ttl_s / 4:
                return lease
            try:
                self._client.attempt(self._client.operations.renew_lease(lease.lease_id))
            except UnknownLease:
                lease = None
            except KVStoreError as error:
                self._client.note("Leases/RenewLease", error)
                lease = None
            else:
                lease.renewed = now
                return lease
        lease_id = self._client.grant_lease(f"{self._client.options.name} get", self._client.options.lease_ttl_ms)
        return _Lease(lease_id, self._client.generation, now)

    def _give_back(self, lease: _Lease, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Drop the pins without waiting for the answer, and keep the lease for the next get."""
        if not lease.lease_id:
            return
        if keys:
            self._client.post(self._client.operations.release(lease.lease_id, namespace_id, keys))
        with self._lock:
            if len(self._idle) < _LEASES_IDLE_MAX:
                self._idle.append(lease)
                return
        self._client.post(self._client.operations.release(lease.lease_id, None, ()))

    # ------------------------------------------------------------ small things

    def layout(self, namespace_id: NamespaceId) -> BlockLayout:
        """Layout of a namespace that this client opened. Raises UnknownNamespace."""
        known = self._client.state.namespace(namespace_id)
        if known is None:
            raise UnknownNamespace(
                f"namespace {namespace_id.hex()[:16]} was not opened by this client",
                field="namespace_id",
                value=namespace_id.hex(),
                expected="an id that open_namespace of this client answered",
            )
        return known.layout

    @property
    def copier(self) -> Copier:
        """The copy threads, made when they are first needed."""
        if self._copier is None:
            self._copier = Copier(self._client.options.copy_threads)
        return self._copier

    def close(self) -> None:
        """End the copy threads. Idempotent."""
        if self._copier is not None:
            self._copier.close()


@dataclass(frozen=True, slots=True)
class _Written:
    outcomes: tuple[Outcome, ...]
    reservation_ids: tuple[ReservationId, ...]
    pending: tuple[int, ...]


class _Commit:
    """The commit of one part, under way while the next part is written."""

    def __init__(
        self,
        client: Client,
        namespace_id: NamespaceId,
        blocks: PutBlocks,
        part: slice,
        written: _Written,
        tokens: int,
    ) -> None:
        self._written = written
        keys, parents = blocks.keys[part], blocks.parents[part]
        entries = [CommitEntry(written.reservation_ids[i], keys[i], parents[i]) for i in written.pending]
        token_ids: list[int] = []
        for i in written.pending if tokens else ():
            begin = (part.start + i) * tokens
            token_ids.extend(blocks.token_ids[begin : begin + tokens])
        self._wait = (
            client.begin(client.operations.commit(namespace_id, entries, token_ids, blocks.durability, None))
            if entries
            else None
        )

    def wait(self) -> CommitResult:
        """Outcomes of the whole part: HIT and existed where a key was resident before, MISS where it got no place."""
        size = len(self._written.outcomes)
        outcomes = [o if o is Outcome.HIT else Outcome.MISS for o in self._written.outcomes]
        reasons = [Reason.NONE if o is Outcome.HIT else Reason.NO_SPACE for o in self._written.outcomes]
        existed = [o is Outcome.HIT for o in self._written.outcomes]
        busy = None
        if self._wait is not None:
            result = self._wait()
            busy = result.busy
            for position, i in enumerate(self._written.pending):
                outcomes[i] = result.outcomes[position]
                reasons[i] = result.reasons[position]
                existed[i] = result.existed[position]
        return CommitResult(tuple(outcomes), tuple(reasons), tuple(existed), (None,) * size, busy)


def _run(place: Place | None, layout: BlockLayout) -> Run:
    if place is None:
        raise InvalidArgument("place", None, "a place, since the outcome has one")
    slice_bytes, _, _ = layout.of_codec(place.codec)
    return Run(place.offset, place.stride, layout.layers, slice_bytes)


def _joined(results: Sequence[CommitResult]) -> CommitResult:
    return CommitResult(
        tuple(o for r in results for o in r.outcomes),
        tuple(x for r in results for x in r.reasons),
        tuple(e for r in results for e in r.existed),
        tuple(p for r in results for p in r.places),
        next((r.busy for r in results if r.busy is not None), None),
    )
