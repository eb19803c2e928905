"""A network of a chosen speed on this machine: a proxy that lets so many bits a second through, each way."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

from kvstore.core.errors import Unavailable

log = logging.getLogger(__name__)

READ_BYTES: Final = 16 << 10
SLACK_S: Final = 0.002
"""How far the link may be behind before it forgets the time that nobody used: a timer wakes up late by so much."""
READY_S: Final = 30.0


@contextmanager
def slow_link(port: int, mbit_s: float) -> Iterator[int]:
    """A port of this machine behind which ``port`` lies over a link of ``mbit_s``; a process of its own carries it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(port, mbit_s, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(READY_S):
            raise Unavailable("the slow link did not begin to listen")
        yield int(ours.recv())
    finally:
        process.kill()
        process.join()


def _serve(port: int, mbit_s: float, ready: Connection) -> None:
    asyncio.run(_listen(port, mbit_s, ready))


async def _listen(port: int, mbit_s: float, ready: Connection) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_carry(reader, far_writer, mbit_s), _carry(far_reader, writer, mbit_s))
        except ConnectionError:
            log.debug("a connection over the slow link was reset")
        finally:
            writer.close()
            far_writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mbit_s: float) -> None:
    """Pass bytes on at the speed of the link. What waits here is bounded by the streams' own limits."""
    free_at = time.perf_counter()
    while data := await reader.read(READ_BYTES):
        now = time.perf_counter()
        free_at = max(free_at, now - SLACK_S) + 8 * len(data) / (mbit_s * 1e6)
        if free_at > now:
            await asyncio.sleep(free_at - now)
        writer.write(data)
        await writer.drain()
    writer.write_eof()
