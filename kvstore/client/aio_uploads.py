"""Write streams of an asyncio session, over a channel of their own of gRPC's blocking API.

gRPC's asyncio API answers INTERNAL, in the place of the daemon's word, where the daemon ends a stream while a message
of it is being sent. The blocking API keeps the daemon's word, and makes the messages in a thread of its own: coding and
checksums would keep the loop for milliseconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, Final

from kvstore.client.channels import channel
from kvstore.client.grpc_errors import no_turn
from kvstore.client.options import Credentials

_INHERITED: Final[list[Any]] = []
"""Channels of the parent's, in the child of a fork."""


class Uploads:
    """Sends Write streams, as many at a time as the daemon allows; the others wait in line."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._credentials = credentials
        self._channel: Any = None
        self._turns = asyncio.Semaphore(1)

    def allow(self, at_once: int) -> None:
        """The daemon has said how many streams it takes at a time."""
        self._turns = asyncio.Semaphore(at_once)

    async def send(self, method: str, messages: Iterator[bytes], metadata: Any, timeout_s: float) -> bytes:
        """Send one stream, when it is its turn, and return the reply. Either may take ``timeout_s``.

        Raises grpc.RpcError, and DeadlineExceeded where its turn did not come.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise no_turn(method, timeout_s) from error
        try:
            return await self._send(method, _Messages(messages), metadata, timeout_s)
        finally:
            self._turns.release()

    async def _send(self, method: str, messages: _Messages, metadata: Any, timeout_s: float) -> bytes:
        if self._channel is None:
            self._channel = channel(self._address, self._credentials)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        call: Any = self._channel.stream_unary(f"/{method}").future(messages, timeout=timeout_s, metadata=metadata)
        call.add_done_callback(lambda _: _tell(loop, ended))
        try:
            await ended.wait()
            return bytes(call.result())
        finally:
            call.cancel()
            messages.end()

    def abandon(self) -> None:
        """In the child of a fork. The channel is the parent's: it is neither used nor closed here."""
        _INHERITED.append(self._channel)
        self._channel = None

    def close(self) -> None:
        """End what is under way. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class _Messages:
    """The messages of one stream, made in a thread of gRPC's; after ``end`` the caller's memory is not touched."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._lock = threading.Lock()
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._ended:
                raise StopIteration
            return next(self._messages)

    def end(self) -> None:
        """Make no more, and wait for the one that is being made: milliseconds at most."""
        with self._lock:
            self._ended = True


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """Called by a thread of gRPC's. Nobody waits in a loop that is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(ended.set)
