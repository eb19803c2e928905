"""Blocks are written: places in the buffer, copies, commits that overlap them. No I/O; see ``flows.py``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, overload

from kvstore.cache import CommitResult
from kvstore.client.operations import Operation, commit_result, request_of
from kvstore.client.payloads import PutBlocks, PutPlan, joined, no_room, put_failed
from kvstore.client.standing import Out, Standing, StandingPlaces, answered, take_out
from kvstore.client.state import GENERATION_SHIFT
from kvstore.client.steps import Call, Connect, Copy, Flow, Send, Upload, Wait
from kvstore.client.streaming import WRITE_PART_BYTES, write_messages, write_planes
from kvstore.core.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BATCH_KEYS_MAX, Area, Busy, NamespaceId, Tier
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
        # Not isinstance, which is a call of its own for a Sequence.
        if type(blocks.payloads) is Staged:
            return blocks.payloads.put(namespace_id, blocks)
        if remote:
            return self._upload(namespace_id, PutPlan.of(layout, blocks, WRITE_PART_BYTES))
        return _Put(self._flows, namespace_id, PutPlan.of(layout, blocks)).run()

    def one_round(self, namespace_id: NamespaceId, plan: PutPlan, commit_s: float) -> OneRound:
        """A put of no more than there is room for now, whose caller says when it goes on. ``commit_s`` is how long the
        commit may take, for which nobody waits."""
        return OneRound(self._flows, namespace_id, plan, commit_s)

    def stage(self, namespace_id: NamespaceId, count: int, *, remote: bool) -> Flow[Staged]:
        """Places to write blocks to; see ``Client.stage``."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= BATCH_KEYS_MAX:
            raise InvalidArgument("count", count, f"1 to {BATCH_KEYS_MAX} blocks")
        if remote:
            raise InvalidArgument(
                "target", "a gRPC address", "a session socket: the buffer is memory of the daemon's host"
            )
        staged = Staged(self._flows, namespace_id)
        try:
            yield from staged.claim(count)
        except KVStoreError as error:
            return self._flows.fall_back("Cache/Reserve", error, lambda: staged)
        except BaseException:
            staged.give_back()
            raise
        return staged

    def claim(self, namespace_id: NamespaceId, count: int, out: Out) -> Flow[tuple[list[Standing], Busy | None]]:
        """Places for up to ``count`` blocks, entered in ``out``: idle ones, and new ones for what is missing.

        With the reason where they are fewer. Raises what stands in the way of a connection.
        """
        flows = self._flows
        link = flows.link
        if link is None or link.closed:
            link = yield Connect()
        places, busy = self._standing.take(link.generation, namespace_id, count), None
        take_out(out, places)
        for tries_left in (1, 0):
            if len(places) == count:
                return places, None
            reserve = flows.operations.reserve(namespace_id, Tier.HOST, (), count - len(places), standing=True)
            reserved = yield from flows.attempt(reserve)
            fresh = [
                place for place in answered(reserved) if place.reservation_id >> GENERATION_SHIFT == link.generation
            ]
            take_out(out, fresh)
            places, busy = places + fresh, reserved.busy
            spare = self._standing.spare(namespace_id) if busy is not None and tries_left else []
            if not spare:
                break
            yield from flows.run(flows.operations.abort(spare))
        return places, busy

    def settle(self, namespace_id: NamespaceId, places: Sequence[Standing], committed: CommitResult, keep: int) -> None:
        """The commit of these places has ended: keep them for the next put, give back what is too many."""
        surplus = self._standing.settle(namespace_id, places, committed, keep)
        if surplus:
            self._flows.post(self._flows.operations.abort(surplus))

    def _upload(self, namespace_id: NamespaceId, plan: PutPlan) -> Flow[CommitResult]:
        flows, results = self._flows, []
        for part in plan.parts:
            try:
                results.append((yield from flows.in_line(partial(self._write, namespace_id, plan, part))))
            except KVStoreError as error:
                results.append(flows.fall_back("Cache/Write", error, partial(put_failed, part.stop - part.start)))
        return joined(results)

    def _write(self, namespace_id: NamespaceId, plan: PutPlan, part: slice) -> Flow[CommitResult]:
        """One Write stream."""
        link = self._flows.link
        if link is None or link.closed:
            link = yield Connect()
        # What the daemon takes is known once it is connected.
        planes = write_planes(self._flows.known(namespace_id), self._flows.options.lossless)
        messages = write_messages(namespace_id, plan, part, planes)
        timeout_s = self._flows.stream_timeout(sum(source.nbytes for source in plan.sources[part]))
        reply = yield Upload(link, "kvstore.v1.Cache/Write", messages, timeout_s)
        return commit_result(self._flows.state, (), cache_pb2.CommitResponse.FromString(reply), link.generation)


class _Put:
    """One put under way: the places that are out, the commit that was sent, the results so far."""

    def __init__(self, flows: Flows, namespace_id: NamespaceId, plan: PutPlan) -> None:
        self._flows = flows
        self._namespace_id = namespace_id
        self._plan = plan
        self._keep = plan.places_max(flows.options.buffer_bytes)
        self._out: Out = {}
        self._sent: _Sent | None = None
        self.busy: Busy | None = None
        """Why there was no more room, where there was not."""
        self.results: list[CommitResult] = []

    def run(self) -> Flow[CommitResult]:
        """Store all blocks, in rounds of as many as there is room for in the buffer, each in parts.

        A part is written while the daemon takes in the one before; a round begins when the one before has ended, since
        it needs its places.
        """
        flows, plan = self._flows, self._plan
        count, begin = len(plan.blocks.keys), 0
        try:
            while begin < count:
                if self._sent is not None:
                    yield from self._take_in()
                try:
                    places, busy = yield from flows.puts.claim(
                        self._namespace_id, min(self._keep, count - begin), self._out
                    )
                except KVStoreError as error:
                    self.results.append(flows.fall_back("Cache/Reserve", error, partial(put_failed, count - begin)))
                    break
                if not places:
                    self.results.append(no_room(count - begin, busy))
                    break
                for at in range(0, len(places), plan.step):
                    yield from self._part(begin + at, places[at : at + plan.step])
                begin += len(places)
            if self._sent is not None:
                yield from self._take_in()
        finally:
            self.give_back()
        return joined(self.results)

    def _part(self, begin: int, places: list[Standing]) -> Flow[None]:
        """Write blocks from ``begin`` on to their places and send their commit."""
        flows, plan = self._flows, self._plan
        link, part = flows.link, slice(begin, begin + len(places))
        try:
            if link is None or places[0].reservation_id >> GENERATION_SHIFT != link.generation:
                raise Unavailable("the connection was lost, and its places with it")
            yield Copy([plan.writes(part, places, link.welcome.arenas.view)], flows.options.copy_threads)
            if self._sent is not None:
                yield from self._take_in()
            entries = plan.entries(part, places)
            operation = flows.operations.commit(
                self._namespace_id, entries, plan.tokens(part), plan.blocks.durability, None
            )
            request = request_of(operation)
            last = part.stop == len(plan.blocks.keys)
            sent = None if last else (yield Send(link, operation.method, request, flows.options.timeout_s))
        except KVStoreError as error:
            if self._sent is not None:
                yield from self._take_in()
            self.results.append(flows.fall_back("Cache/Commit", error, partial(put_failed, len(places))))
            return
        commit = _Sent(link, sent, operation, places)
        if not last:
            self._no_longer_out(places)
            self._sent = commit
            return
        # Nothing is left that could be written meanwhile. Once it is sent, the call answers for its places.
        late, begun = partial(self._settle, commit), partial(self._no_longer_out, places)
        try:
            reply = yield Call(link, operation.method, request, flows.options.timeout_s, late, begun)
        except KVStoreError as error:
            self.results.append(self._failed(commit, error))
        else:
            self.results.append(self._settle(commit, reply))

    def _no_longer_out(self, places: Sequence[Standing]) -> None:
        """A commit with these places was sent: its reply brings them back."""
        for place in places:
            del self._out[place.reservation_id]

    def _take_in(self) -> Flow[None]:
        """Take the reply of the commit that was sent."""
        flows, sent = self._flows, self._sent
        if sent is None:
            return
        # From here on Wait answers for the places: what it does not bring here comes to ``late``, once.
        self._sent = None
        operation = sent.operation
        try:
            late = partial(self._settle, sent)
            reply = yield Wait(sent.link, sent.call, operation.method, flows.options.timeout_s, late)
        except KVStoreError as error:
            self.results.append(self._failed(sent, error))
        else:
            self.results.append(self._settle(sent, reply))

    def _failed(self, sent: _Sent, error: KVStoreError) -> CommitResult:
        """The commit has no answer, or was refused as a whole: then its places are still reserved, and go back.

        Without an answer they stay out until the reply comes, if it does: the daemon may still copy from them.
        """
        flows = self._flows
        if not isinstance(error, DeadlineExceeded | Unavailable):
            flows.post(flows.operations.abort([place.reservation_id for place in sent.places]))
        return flows.fall_back(sent.operation.method, error, sent.operation.fallback)

    def _settle(self, sent: _Sent, reply: bytes) -> CommitResult:
        """The commit was answered: its places are idle again."""
        committed = sent.operation.parse(sent.operation.reply.FromString(reply), sent.link.generation)
        self._flows.puts.settle(self._namespace_id, sent.places, committed, self._keep)
        return committed

    def give_back(self) -> None:
        """Give back every place that is still out; those of a commit that was sent come back with its reply."""
        if self._sent is not None:
            self._sent.link.forget(self._sent.call, partial(self._settle, self._sent))
            self._sent = None
        if self._out:
            self._flows.post(self._flows.operations.abort(list(self._out)))
            self._out.clear()


class OneRound(_Put):
    """A put in two steps: ``fill`` copies, after which the caller may use its memory again, ``publish`` commits.

    It takes as many blocks, from the first on, as there is room for in the buffer: an engine's step must not wait for
    the commits of earlier ones. ``give_back`` must be called in any case.
    """

    def __init__(self, flows: Flows, namespace_id: NamespaceId, plan: PutPlan, commit_s: float) -> None:
        super().__init__(flows, namespace_id, plan)
        self._commit_s = commit_s
        self._places: Sequence[Standing] = ()

    def fill(self) -> Flow[int]:
        """Copy into the buffer. Returns how many blocks that were; raises what stands in the way."""
        places = yield from self._claimed(min(len(self._plan.blocks.keys), BATCH_KEYS_MAX))
        if places:
            writes = self._plan.writes(slice(0, len(places)), places, self._memory)
            yield Copy([writes], self._flows.options.copy_threads)
        self._places = places
        return len(places)

    def _claimed(self, count: int) -> Flow[list[Standing]]:
        places, self.busy = yield from self._flows.puts.claim(self._namespace_id, min(self._keep, count), self._out)
        return places

    def _memory(self, area: Area) -> memoryview:
        view: memoryview = self._link(tuple(self._out.values())).welcome.arenas.view(area)
        return view

    def publish(self) -> Flow[CommitResult]:
        """Commit what was copied. Raises what stands in the way."""
        plan = self._plan
        places = list(self._places)[: len(plan.blocks.keys)]
        part = slice(0, len(places))
        operation = self._flows.operations.commit(
            self._namespace_id, plan.entries(part, places), plan.tokens(part), plan.blocks.durability, None
        )
        commit = _Sent(self._link(places), None, operation, places)
        late, begun = partial(self._settle, commit), partial(self._no_longer_out, places)
        try:
            reply = yield Call(commit.link, operation.method, request_of(operation), self._commit_s, late, begun)
        except KVStoreError as error:
            return self._failed(commit, error)
        return self._settle(commit, reply)

    def _link(self, places: Sequence[Standing]) -> Any:
        link = self._flows.link
        if link is None or places[0].reservation_id >> GENERATION_SHIFT != link.generation:
            raise Unavailable("the connection was lost, and its places with it")
        return link


class Staged(OneRound, Sequence[memoryview]):
    """Places for whole blocks in the session's buffer, written by the caller where the daemon takes them from.

    ``staged[i]`` is the memory of one; there may be fewer than were asked for, where the buffer has no more room.
    ``put`` with it as ``payloads`` stores its first blocks, one for each key, once. After that, or the end of the
    ``with``, the memory is not the caller's: what still writes there writes into later blocks of this client.
    """

    def __init__(self, flows: Flows, namespace_id: NamespaceId) -> None:
        self.layout = flows.known(namespace_id).layout
        super().__init__(
            flows, namespace_id, PutPlan.staged(self.layout, PutBlocks((), (), ())), flows.options.timeout_s
        )
        self._buffer = memoryview(b"")

    def __len__(self) -> int:
        return len(self._places)

    @property
    def stride(self) -> int:
        """Bytes from one layer's slice of a block to the next."""
        return self._places[0].place.stride if self._places else 0

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        """Writable memory of a block: ``raw_slice_bytes`` a layer, ``stride`` apart, from its first byte on."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        begin = self._places[index].place.offset
        return self._buffer[begin : begin + (self.layout.layers - 1) * self.stride + self.layout.raw_slice_bytes]

    def layer(self, index: int, layer: int) -> memoryview:
        """Writable memory of one layer of a block, ``raw_slice_bytes`` long."""
        if not 0 <= layer < self.layout.layers:
            raise InvalidArgument("layer", layer, f"0 to {self.layout.layers - 1}")
        begin = layer * self.stride
        return self[index][begin : begin + self.layout.raw_slice_bytes]

    def claim(self, count: int) -> Flow[None]:
        """For the client: take the places. Raises what stands in the way."""
        places = yield from self._claimed(count)
        if places:
            self._buffer = self._memory(Area.BUFFER)
        self._places = places

    def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> Flow[CommitResult]:
        """For the client: store the first blocks, and give the other places back."""
        count = len(blocks.keys)
        if not 1 <= count <= len(self):
            raise InvalidArgument(
                "keys", f"{count} keys", f"1 to {len(self)}, the blocks that are staged and not put yet"
            )
        if namespace_id != self._namespace_id:
            raise InvalidArgument(
                "namespace_id", namespace_id.hex(), f"{self._namespace_id.hex()}, which was staged for"
            )
        self._plan = PutPlan.staged(self.layout, blocks)
        try:
            return (yield from self.publish())
        except KVStoreError as error:
            return self._flows.fall_back("Cache/Commit", error, partial(put_failed, count))
        finally:
            self.give_back()

    def give_back(self) -> None:
        """End: what was not put goes back. Waits for nothing. Idempotent."""
        self._places, self._buffer = (), memoryview(b"")
        super().give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class _Sent(NamedTuple):
    """A commit that was sent and whose reply was not taken."""

    link: Any
    call: Any
    operation: Operation[CommitResult]
    places: list[Standing]
