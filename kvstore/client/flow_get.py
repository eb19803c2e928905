"""Blocks are read: copied out, or looked at where they lie, under the client's own leases. No I/O; see ``flows.py``."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstore.cache import FetchResult
from kvstore.client.copying import aligned_buffer
from kvstore.client.operations import missed, request_of
from kvstore.client.payloads import (
    GetPlan,
    GotBlocks,
    Views,
)
from kvstore.client.steps import Call, Connect, Copy, Download, Flow
from kvstore.client.streaming import (
    Assembler,
    parse_chunk,
    read_request,
)
from kvstore.core.errors import (
    DeadlineExceeded,
    KVStoreError,
    Unavailable,
    UnknownLease,
)
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, LeaseId, NamespaceId, Outcome, Reason, Target

log = logging.getLogger("kvstore.client")
T = TypeVar("T")

if TYPE_CHECKING:
    from kvstore.client.flows import Flows
    from kvstore.client.pieces import LoadPlan

LEASES_IDLE_MAX: Final = 16


@dataclass(slots=True)
class OwnLease:
    """A lease that the client granted itself, and until when it lives if it is not renewed."""

    lease_id: LeaseId
    link: Any
    ttl_s: float
    renewed: float


class Gets:
    """The flows that read, and the leases that no get uses now."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._idle: deque[OwnLease] = deque()

    def get(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, out: object | None, wait_ms: int, remote: bool
    ) -> Flow[GotBlocks]:
        """Copy blocks out; see ``Client.get``."""
        known = self._flows.known(namespace_id)
        slot = known.slot_bytes
        plan = GetPlan.of(known.layout, len(keys), aligned_buffer(slot * len(keys)) if out is None else out, slot)
        return self._remote(namespace_id, keys, plan) if remote else self._copy_out(namespace_id, keys, plan, wait_ms)

    def load(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], plan: LoadPlan, wait_ms: int
    ) -> Flow[tuple[list[Outcome], list[Reason]]]:
        """Copy blocks into pieces, in windows where HOST can not pin all at one time. Raises what stands in the way."""
        outcomes, reasons = [Outcome.MISS] * len(keys), [Reason.NONE] * len(keys)
        deadline = self._flows.clock.now() + wait_ms / 1000
        left = list(range(len(keys)))
        while left:
            # A call takes each key once; those that are there again are copied in the next one.
            different = {keys[i]: i for i in reversed(left)}
            window = sorted(different.values())[:BATCH_KEYS_MAX]
            some, wait = plan.take(window), max(0, round((deadline - self._flows.clock.now()) * 1000))
            got = yield from self._copy_out(namespace_id, [keys[i] for i in window], some, wait)
            again = set()
            for i, outcome, reason in zip(window, got.outcomes, got.reasons, strict=True):
                outcomes[i], reasons[i] = outcome, reason
                if outcome is Outcome.BUSY or (outcome is Outcome.MISS and reason is Reason.NO_SPACE):
                    again.add(i)
            # Those that found no room are asked for again as long as each round brings some.
            done = set(window) - (again if len(again) < len(window) else set())
            left = [i for i in left if i not in done]
        return outcomes, reasons

    def _copy_out(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], plan: GetPlan | LoadPlan, wait_ms: int
    ) -> Flow[GotBlocks]:
        flows = self._flows
        link, again = flows.link, True
        while True:
            lease, settled = None, False
            try:
                lease = yield from self.take_lease()
                operation = flows.operations.fetch(
                    namespace_id, keys, Target.IN_PLACE, lease_id=lease.lease_id, layers=None, wait_ms=wait_ms
                )
                timeout_s = flows.options.timeout_s + wait_ms / 1000
                reply = yield Call(lease.link, operation.method, request_of(operation), timeout_s)
                fetched = operation.parse(operation.reply.FromString(reply), lease.link.generation)
                settled = Outcome.PENDING not in fetched.outcomes
                copies, got = plan.reads(fetched, lease.link.welcome.arenas.view)
                yield Copy(copies, flows.options.copy_threads)
                got, wrong = plan.proven(got, fetched, lease.link.welcome.arenas.versions)
                if wrong:
                    gone = DeadlineExceeded(f"{wrong} blocks went while they were copied", field="lease")
                    flows.note("Cache/Fetch", gone)
                return got
            except KVStoreError as error:
                if not (again and _lost(link, error)):
                    return flows.fall_back("Cache/Fetch", error, Assembler(plan, len(keys)).result)
                again = False
            finally:
                if lease is not None:
                    self.give_back(lease, namespace_id, keys, settled=settled)

    def _remote(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], plan: GetPlan) -> Flow[GotBlocks]:
        try:
            return (yield from self._flows.in_line(partial(self._download, namespace_id, keys, plan)))
        except KVStoreError as error:
            return self._flows.fall_back("Cache/Read", error, Assembler(plan, len(keys)).result)

    def _download(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], plan: GetPlan) -> Flow[GotBlocks]:
        link = self._flows.link
        if link is None or link.closed:
            link = yield Connect()
        assembler = Assembler(plan, len(keys))
        request = read_request(namespace_id, keys, self._flows.options.lossless)
        timeout_s = self._flows.stream_timeout(plan.destination.nbytes)
        yield Download(link, "kvstore.v1.Cache/Read", request, timeout_s, lambda m: assembler.take(parse_chunk(m)))
        return assembler.result()

    def open_views(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], wait_ms: int) -> Flow[Views]:
        """Pin blocks and show where they lie; ``close_views`` ends it."""
        layout = self._flows.known(namespace_id).layout
        try:
            return (yield from self._again_if_lost(partial(self._look, namespace_id, keys, wait_ms, layout)))
        except KVStoreError as error:
            nothing = partial(Views.of, missed(len(keys)), layout, _no_memory, {})
            return self._flows.fall_back("Cache/Fetch", error, nothing)

    def _look(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], wait_ms: int, layout: Any) -> Flow[Views]:
        lease = yield from self.take_lease()
        views = None
        try:
            fetched = yield from self._fetch(lease, namespace_id, keys, wait_ms)
            arenas = lease.link.welcome.arenas
            views = Views.of(fetched, layout, arenas.view, arenas.versions)
            views.lease, views.rights = lease, (namespace_id, keys, Outcome.PENDING not in fetched.outcomes)
            return views
        finally:
            if views is None:
                self.give_back(lease, namespace_id, keys, settled=False)

    def renew_views(self, views: Views) -> Flow[None]:
        """Renew the lease of open views. One that has ended can not be renewed: the views then hold no longer."""
        lease = views.lease
        if lease is None or views.ended:
            return
        try:
            yield from self.renew(lease)
        except KVStoreError as error:
            views.lost = True
            self._flows.note("Leases/RenewLease", error)

    def close_views(self, views: Views) -> None:
        """The views are looked at no longer. Says (raises, if the client is strict) if they did not hold till now."""
        lease = views.lease
        if lease is None or views.ended:
            return
        alive = not views.lost and not lease.link.closed and self._flows.clock.now() < lease.renewed + lease.ttl_s
        held = views.end(alive)
        namespace_id, keys, settled = views.rights
        self.give_back(lease, namespace_id, keys, settled=settled)
        if not held:
            gone = DeadlineExceeded("blocks went while they were looked at in place: what was read may be another's")
            self._flows.fall_back("Cache/Fetch", gone, lambda: None)

    def _again_if_lost(self, flow: Callable[[], Flow[T]]) -> Flow[T]:
        """Run a flow that only reads; once more if its connection or its lease turns out to be gone."""
        link = self._flows.link
        try:
            return (yield from flow())
        except KVStoreError as error:
            if not _lost(link, error):
                raise
        return (yield from flow())

    def _fetch(
        self, lease: OwnLease, namespace_id: NamespaceId, keys: Sequence[BlockKey], wait_ms: int
    ) -> Flow[FetchResult]:
        operation = self._flows.operations.fetch(
            namespace_id, keys, Target.IN_PLACE, lease_id=lease.lease_id, layers=None, wait_ms=wait_ms
        )
        return (yield from self._flows.on(lease.link, operation))

    # ------------------------------------------------------------ leases of its own

    def take_lease(self) -> Flow[OwnLease]:
        """An idle lease of the present link, renewed in time, or a new one. It is this caller's alone."""
        link = self._flows.link
        if link is None or link.closed:
            link = yield Connect()
        while self._idle:
            try:
                lease = self._idle.pop()
            except IndexError:
                break
            if lease.link is not link:
                continue
            if self._flows.clock.now() - lease.renewed >= lease.ttl_s / 4:
                try:
                    yield from self.renew(lease)
                except UnknownLease:
                    continue
            return lease
        began = self._flows.clock.now()
        asked = self._flows.operations.grant_lease(f"{self._flows.options.name} get", self._flows.options.lease_ttl_ms)
        late = self._flows.late_of(link, asked)
        reply = yield Call(link, asked.method, request_of(asked), self._flows.options.timeout_s, late)
        granted: Any = asked.reply.FromString(reply)
        # It may be shorter than what was asked for; a daemon that does not say so granted all of it.
        ttl_ms = granted.ttl_ms or self._flows.options.lease_ttl_ms
        return OwnLease(asked.parse(granted, link.generation), link, ttl_ms / 1000, began)

    def renew(self, lease: OwnLease) -> Flow[None]:
        """Renew a lease. Raises UnknownLease if it has ended."""
        began = self._flows.clock.now()
        ttl_ms = yield from self._flows.on(lease.link, self._flows.operations.renew_lease(lease.lease_id))
        # Counted from before it was sent: the daemon's own time began no earlier.
        lease.renewed, lease.ttl_s = began, (ttl_ms or self._flows.options.lease_ttl_ms) / 1000

    def give_back(self, lease: OwnLease, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, settled: bool) -> None:
        """Drop the pins without waiting for the answer, and keep the lease for the next get.

        One that may be given more pins later (a job under way, an answer that did not come) is ended whole.
        """
        if lease.link.closed:
            return
        if settled and len(self._idle) < LEASES_IDLE_MAX:
            if keys:
                self._flows.post(self._flows.operations.release(lease.lease_id, namespace_id, keys), lease.link)
            self._idle.append(lease)
            return
        self._flows.post(self._flows.operations.release(lease.lease_id, None, ()), lease.link)


def _lost(link: Any, error: KVStoreError) -> bool:
    """Whether a call that only reads has failed because the connection has gone, or the lease.

    A lease ends without a word where this process was stopped for longer than it lives.
    """
    return isinstance(error, UnknownLease) or (isinstance(error, Unavailable) and link is not None and link.closed)


def _no_memory(area: Area) -> memoryview:
    raise Unavailable(f"{area.name} is not mapped")
