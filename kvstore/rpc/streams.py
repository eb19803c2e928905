"""The stream methods, for sessions without shared memory: Read, Write, Subscribe.

Read pins a few blocks at a time and sends chunks of at most 1 MiB, each with its CRC-32C. Write takes all
bytes in before it commits: nothing is visible before the stream has ended well. Both are bounded: Read by the window
of gRPC, Write by ``WRITE_BYTES_MAX`` a stream and ``WRITES_MAX`` streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Final

from kvstore.cache import FetchResult
from kvstore.core.errors import InvalidArgument, ResourceExhausted, Unauthenticated, Unavailable
from kvstore.core.types import (
    Outcome,
    Place,
    Reason,
)
from kvstore.rpc.context import CallContext
from kvstore.rpc.dispatch import Dispatcher
from kvstore.rpc.stream_blocks import PEER_WRITES_MAX, WRITE_BYTES_MAX, WRITES_MAX, Header, Reader, Writer
from kvstore.store.report import BlockEvent
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.v1 import cache_pb2, events_pb2
from kvstore.wire import messages as convert
from kvstore.wire.verbs.writes import commit_message

log = logging.getLogger(__name__)

READ_BLOCKS: Final = 8
"""Blocks that one Read pins at a time."""

SESSION_LOOK_S: Final = 5.0
"""How often a subscription without events looks whether its session still lives."""

EVENTS_STEP: Final = 256


class Streams:
    """Handlers of the stream methods."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._wire = dispatcher.services.wire
        self._writes = 0
        self._writers: Counter[str] = Counter()
        """Write streams under way, by peer."""
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End subscriptions, which else would last for ever."""
        self._stopping.set()

    # ------------------------------------------------------------ Read

    async def read(self, ctx: CallContext, request: cache_pb2.ReadRequest) -> AsyncGenerator[cache_pb2.ReadChunk, None]:
        """Cache/Read."""
        namespace = convert.namespace_of(request.namespace_id)
        keys = convert.keys_of(request.keys)
        layers = convert.layers_of(request.layer_begin, request.layer_end)
        session = ctx.session
        found = session.opened(namespace)
        reader = Reader(session, found, layers or (0, found.layout.layers), frozenset(request.accept))
        # Without a clock: the reader may pause as long as its stream lives.
        with session.pins("read stream") as lease_id:
            for begin in range(0, len(keys), READ_BLOCKS):
                part = keys[begin : begin + READ_BLOCKS]
                fetched = await self._dispatcher.wait(partial(reader.fetch, part, lease_id))
                for position, key in enumerate(part):
                    index = begin + position
                    place = fetched.places[position]
                    if fetched.outcomes[position] is not Outcome.HIT or place is None:
                        yield _missing(index, fetched, position)
                        continue
                    async for chunk in self._block(reader, index, place):
                        yield chunk
                    session.release(lease_id, namespace, [key])

    async def _block(self, reader: Reader, index: int, place: Place) -> AsyncIterator[cache_pb2.ReadChunk]:
        """Chunks of a pinned block. That its place held is proven after each copy, since a session may end at any."""
        begin, size, coder = 0, reader.payload_bytes(place), reader.coder(place)
        while begin < size:
            chunk = await self._dispatcher.work(partial(reader.chunk, index, place, begin, coder))
            if not reader.session.held(place):
                raise Unavailable("what was being read is no longer kept for the stream: its pins were given up")
            begin += self._wire.read.count(chunk)
            yield chunk

    # ------------------------------------------------------------ Write

    async def write(self, ctx: CallContext, chunks: AsyncIterator[cache_pb2.WriteChunk]) -> cache_pb2.CommitResponse:
        """Cache/Write."""
        session = ctx.session
        if self._writes >= WRITES_MAX:
            raise ResourceExhausted(
                f"{self._writes} write streams are under way", field="calls", value=self._writes,
                expected=f"at most {WRITES_MAX}",
            )  # fmt: skip
        if self._writers[session.peer] >= PEER_WRITES_MAX:
            raise ResourceExhausted(
                f"{self._writers[session.peer]} write streams of {session.peer} are under way", field="calls",
                value=self._writers[session.peer], expected=f"at most {PEER_WRITES_MAX} of one peer",
            )  # fmt: skip
        self._writes += 1
        self._writers[session.peer] += 1
        try:
            async for first in chunks:
                return await self._write(ctx.store, session, first, chunks)
            raise InvalidArgument("header", "unset", "a WriteHeader in the first message")
        finally:
            self._writes -= 1
            self._writers[session.peer] -= 1
            self._writers += Counter()

    async def _write(
        self,
        store: Store,
        session: Session,
        first: cache_pb2.WriteChunk,
        chunks: AsyncIterator[cache_pb2.WriteChunk],
    ) -> cache_pb2.CommitResponse:
        if not first.HasField("header"):
            raise InvalidArgument("header", "unset", "a WriteHeader in the first message")
        header = Header.of(first.header)
        namespace = session.opened(header.namespace_id)
        session.check_writes(header.namespace_id)
        layout = namespace.layout
        size = len(header.keys) * layout.layers * layout.raw_slice_bytes
        if size > WRITE_BYTES_MAX:
            raise InvalidArgument("header.keys", f"{size} bytes of payload", f"at most {WRITE_BYTES_MAX} a stream")
        writer = Writer(store, header, namespace, session.peer)
        try:
            await self._dispatcher.work(writer.open)
            if first.data:
                await self._take(writer, first)
            async for chunk in chunks:
                if session.ended:
                    raise Unauthenticated("the session has ended, and its write stream with it", field="session")
                if chunk.HasField("header"):
                    raise InvalidArgument("header", "set", "a header in the first message only")
                await self._take(writer, chunk)
            writer.check_whole()
            result = await self._dispatcher.work(writer.commit)
            return commit_message(result)
        finally:
            await self._end(writer)

    async def _end(self, writer: Writer) -> None:
        """Unmapping a buffer of up to 256 MiB is not for the loop, unless there is no other way."""
        try:
            await self._dispatcher.work(writer.close)
        except (ResourceExhausted, Unavailable) as error:
            log.debug("a write stream is ended by the loop: %s", error)
        finally:
            writer.close()

    async def _take(self, writer: Writer, chunk: cache_pb2.WriteChunk) -> None:
        if chunk.HasField("coded"):
            await self._dispatcher.work(partial(writer.take, chunk))
        else:
            # A copy of a megabyte, which takes no longer than the hop to a thread.
            writer.take(chunk)
        self._wire.write.count(chunk)

    # ------------------------------------------------------------ Subscribe

    async def subscribe(
        self, ctx: CallContext, request: events_pb2.SubscribeRequest
    ) -> AsyncGenerator[events_pb2.BlockEvent, None]:
        """Events/Subscribe. Without admin rights: of the namespaces that the session has opened, and no others."""
        store, session = ctx.store, ctx.session
        namespace = convert.namespace_of(request.namespace_id) if request.namespace_id else None
        if namespace is not None and not ctx.admin:
            session.opened(namespace)
        everything = None if ctx.admin else session.namespaces
        wanted = everything if namespace is None else (namespace,)
        sequence = request.after_sequence or store.last_event
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        unsubscribe = store.on_events(lambda: _wake(loop, news))
        stopped = loop.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                news.clear()
                if session.ended:
                    raise Unauthenticated("the session has ended, and its subscription with it", field="session")
                # What is not for this subscriber is passed over once, and not read again at each event.
                events, sequence = store.read_events(sequence, wanted, EVENTS_STEP)
                for event in events:
                    yield _event_message(event)
                if sequence < store.last_event:
                    # Others get their turn of the loop between two steps.
                    await asyncio.sleep(0)
                    continue
                waiting = loop.create_task(news.wait())
                await asyncio.wait({waiting, stopped}, timeout=SESSION_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        finally:
            stopped.cancel()
            unsubscribe()


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    """Called from the store's threads."""
    loop.call_soon_threadsafe(news.set)


def _missing(index: int, fetched: FetchResult, position: int) -> cache_pb2.ReadChunk:
    outcome, reason = fetched.outcomes[position], fetched.reasons[position]
    if outcome is Outcome.PENDING:
        outcome, reason = Outcome.MISS, Reason.DEADLINE
    return cache_pb2.ReadChunk(
        key_index=index,
        outcome=int(outcome),  # type: ignore[arg-type]
        reason=int(reason),  # type: ignore[arg-type]
    )


def _event_message(event: BlockEvent) -> events_pb2.BlockEvent:
    return events_pb2.BlockEvent(
        sequence=event.sequence,
        unix_seconds=event.unix_seconds,
        kind=int(event.kind),  # type: ignore[arg-type]
        tier=int(event.tier or 0),  # type: ignore[arg-type]
        namespace_id=event.namespace_id,
        keys=b"".join(event.keys),
        parents=b"".join(event.parents),
        token_ids=event.token_ids,
        block_tokens=event.block_tokens,
    )
