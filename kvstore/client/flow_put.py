"""Blocks are written: places in the buffer, copies, commits that overlap them. No I/O; see ``flows.py``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cache import CommitResult, ReserveResult
from kvstore.client.operations import Operation, commit_result, request_of
from kvstore.client.payloads import (
    PutBlocks,
    PutPlan,
    joined,
    part_of,
    part_result,
    pending_of,
    put_failed,
)
from kvstore.client.standing import Out, Standing, StandingPlaces, answered, claimed, take_out
from kvstore.client.state import GENERATION_SHIFT
from kvstore.client.steps import Connect, Copy, Flow, Late, Send, Upload, Wait
from kvstore.client.streaming import (
    WRITE_PART_BYTES,
    write_messages,
    write_planes,
)
from kvstore.core.errors import (
    KVStoreError,
    Unavailable,
)
from kvstore.core.types import NamespaceId, Tier
from kvstore.v1 import cache_pb2

log = logging.getLogger("kvstore.client")
T = TypeVar("T")

if TYPE_CHECKING:
    from kvstore.client.flows import Flows


class Puts:
    """The flows that write, and the places that stay reserved from one put to the next."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._standing = StandingPlaces()

    def put(self, namespace_id: NamespaceId, blocks: PutBlocks, *, remote: bool) -> Flow[CommitResult]:
        """Store blocks; see ``Client.put``."""
        layout = self._flows.known(namespace_id).layout
        if remote:
            return (yield from self._upload(namespace_id, PutPlan.of(layout, blocks, WRITE_PART_BYTES)))
        plan = PutPlan.of(layout, blocks)
        put = _Put(self._flows, namespace_id, plan)
        try:
            for window in plan.windows(self._flows.options.buffer_bytes):
                yield from put.window(window)
            yield from put.take_in()
        finally:
            put.end()
        return joined(put.results)

    def claim(self, namespace_id: NamespaceId, count: int, out: Out) -> Flow[ReserveResult]:
        """Places for ``count`` blocks, entered in ``out``: idle ones, and new ones for what is missing."""
        link = self._flows.link
        if link is None or link.closed:
            try:
                link = yield Connect()
            except KVStoreError as error:
                reserve = self._flows.operations.reserve(namespace_id, Tier.HOST, (), count)
                return self._flows.fall_back(reserve.method, error, reserve.fallback)
        places, busy = self._standing.take(link.generation, namespace_id, count), None
        take_out(out, places, link.generation)
        for tries_left in (1, 0):
            if len(places) == count:
                break
            missing = count - len(places)
            reserved = yield from self._flows.run(
                self._flows.operations.reserve(namespace_id, Tier.HOST, (), missing, standing=True)
            )
            fresh = answered(reserved)
            take_out(out, fresh, self._flows.generation)
            places, busy = places + fresh, reserved.busy
            spare = self._standing.spare(namespace_id) if busy is not None and tries_left else []
            if not spare:
                break
            yield from self._flows.run(self._flows.operations.abort(spare))
        present = [place for place in places if place.reservation_id in out]
        return claimed(present, count, busy)

    def settle(self, namespace_id: NamespaceId, places: Sequence[Standing], committed: CommitResult, keep: int) -> None:
        """The commit of these places has ended: keep them for the next put, give back what is too many."""
        surplus = self._standing.settle(namespace_id, places, committed, keep)
        if surplus:
            self._flows.post(self._flows.operations.abort(surplus))

    def _upload(self, namespace_id: NamespaceId, plan: PutPlan) -> Flow[CommitResult]:
        results = []
        for part in plan.parts:
            size = sum(source.nbytes for source in plan.sources[part])
            try:
                link = self._flows.link
                if link is None or link.closed:
                    link = yield Connect()
                # What the daemon takes is known once it is connected.
                planes = write_planes(self._flows.known(namespace_id), self._flows.options.lossless)
                messages = write_messages(namespace_id, plan, part, planes)
                reply = yield Upload(link, "kvstore.v1.Cache/Write", messages, self._flows.stream_timeout(size))
                results.append(commit_result(cache_pb2.CommitResponse.FromString(reply)))
            except KVStoreError as error:
                results.append(self._flows.fall_back("Cache/Write", error, partial(put_failed, part.stop - part.start)))
        return joined(results)


class _Put:
    """One put under way: the places that are out, the commit that was sent, the results so far."""

    def __init__(self, flows: Flows, namespace_id: NamespaceId, plan: PutPlan) -> None:
        self._flows = flows
        self._namespace_id = namespace_id
        self._plan = plan
        self._keep = plan.places_max(flows.options.buffer_bytes)
        self._out: Out = {}
        self._sent: tuple[Any, Any, Operation[CommitResult], list[Standing], ReserveResult] | None = None
        self.results: list[CommitResult] = []

    def window(self, window: slice) -> Flow[None]:
        """Store the blocks of a window, in as many rounds as the room in the buffer makes it."""
        begin = window.start
        while begin < window.stop:
            # The commit before has the places that this round needs.
            yield from self.take_in()
            reserved = yield from self._flows.puts.claim(self._namespace_id, window.stop - begin, self._out)
            got = len(pending_of(reserved))
            if not got:
                self.results.append(part_result(part_of(reserved, 0, window.stop - begin), None))
                return
            for part in self._plan.parts_of(slice(begin, begin + got)):
                yield from self._part(part, part_of(reserved, part.start - begin, part.stop - begin))
            begin += got

    def _part(self, part: slice, reserved: ReserveResult) -> Flow[None]:
        flows, plan = self._flows, self._plan
        link = flows.link
        try:
            if link is None or reserved.reservation_ids[0] >> GENERATION_SHIFT != link.generation:
                raise Unavailable("the connection was lost, and its places with it")
            copies = plan.writes(part, reserved, link.welcome.arenas.view)
            yield Copy(copies, flows.options.copy_threads)
            yield from self.take_in()
            tokens = plan.tokens(range(part.start, part.stop))
            entries = plan.entries(part, reserved)
            operation = flows.operations.commit(self._namespace_id, entries, tokens, plan.blocks.durability, None)
            sent = yield Send(link, operation.method, request_of(operation), flows.options.timeout_s)
        except KVStoreError as error:
            yield from self.take_in()
            self.results.append(flows.fall_back("Cache/Commit", error, partial(put_failed, part.stop - part.start)))
            return
        places = [self._out.pop(entry.reservation_id) for entry in entries]
        self._sent = link, sent, operation, places, reserved

    def take_in(self) -> Flow[None]:
        """Take the reply of the commit that was sent."""
        if self._sent is None:
            return
        link, sent, operation, _, reserved = self._sent
        late, flows = self._late(), self._flows
        # From here on Wait answers for the places: what it does not bring here comes to ``late``, once.
        places, self._sent = self._sent[3], None
        try:
            reply = yield Wait(link, sent, operation.method, flows.options.timeout_s, late)
            committed = operation.parse(operation.reply.FromString(reply), link.generation)
        except KVStoreError as error:
            # The places stay out until the reply comes, if it does: the daemon may still copy from them.
            self.results.append(part_result(reserved, flows.fall_back(operation.method, error, operation.fallback)))
            return
        flows.puts.settle(self._namespace_id, places, committed, self._keep)
        self.results.append(part_result(reserved, committed))

    def _late(self) -> Late:
        """What takes the places back when the commit's reply comes after its caller has gone."""
        if self._sent is None:
            return lambda _: None
        link, _, operation, places, _ = self._sent

        def late(reply: bytes) -> None:
            committed = operation.parse(operation.reply.FromString(reply), link.generation)
            self._flows.puts.settle(self._namespace_id, places, committed, self._keep)

        return late

    def end(self) -> None:
        """Give back every place that is still out; those of a commit that was sent come back with its reply."""
        if self._sent is not None:
            link, sent = self._sent[:2]
            link.forget(sent, self._late())
            self._sent = None
        if self._out:
            self._flows.post(self._flows.operations.abort(list(self._out)))
            self._out.clear()
