"""The thread behind ``EngineClient``: an event loop with an ``AsyncClient``, which it keeps connected.

The engine's threads never connect and never wait for a connection: while there is none, or while the daemon does not
answer, whatever they ask for is a miss at once. A call that was not answered in time opens the breaker; then one probe
after another goes out, with pauses that grow, and the first that is answered closes it. All of this thread's state is
used on its loop only, but for ``usable``, which is read from anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.client.aio import AsyncClient
from kvstore.client.options import ClientOptions
from kvstore.client.transfers import Found
from kvstore.core.clock import Clock
from kvstore.core.errors import DeadlineExceeded, KVStoreError
from kvstore.wire.verbs.base import KnownNamespace

log = logging.getLogger("kvstore.client")
T = TypeVar("T")

RENEW_SECONDS_MAX: Final = 20.0
"""Longest between two looks at what has to be renewed."""


class EngineLoop:
    """One connection and the thread that keeps it."""

    def __init__(self, target: str | Path, options: ClientOptions, clock: Clock | None) -> None:
        # Failures have to be seen here, where the breaker is; the engine is told misses.
        self.client = AsyncClient(target, replace(options, strict=True), clock=clock)
        self.order: asyncio.Lock
        """Commits go one after another, since a block's parent may be in the one before."""
        self._found: set[Found] = set()
        """What is held."""
        self._news = False
        """Whether the keeper has something else to do than it knows."""
        self.up = threading.Event()
        """Set while there is a connection, and calls are answered."""
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Event
        self._begun = threading.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        self._thread.start()
        self._begun.wait()

    @property
    def usable(self) -> bool:
        """Whether a call can be made now. Never waits."""
        return self.up.is_set() and self.client.connected

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the loop, from any thread. RuntimeError once it has ended."""
        return asyncio.run_coroutine_threadsafe(self._count(work), self._loop)

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call on the loop, soon. Once it has ended nothing is called: the session's end gives all back."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def remember(self, known: KnownNamespace) -> None:
        """Open a namespace on this connection and all later ones."""
        self.client.state.remember(known.spec.namespace_id, known)

    def failed(self, method: str, error: KVStoreError) -> None:
        """Count a failure that the engine is told as misses. One of time opens the breaker."""
        self.client.flows.note(method, error)
        if isinstance(error, DeadlineExceeded) and self.up.is_set():
            log.warning("the daemon does not answer; until it does, everything is a miss at once")
            self.up.clear()
            self._wake()

    def keep(self, found: Found) -> None:
        """Renew its lease until ``let_go``. On the loop."""
        self._found.add(found)
        self._wake()

    def let_go(self, found: Found) -> None:
        """What it holds may go. On the loop."""
        if found in self._found:
            self._found.discard(found)
            if found.looked is not None:
                self.client.flows.lookups.end(found.looked)

    def close(self) -> None:
        """End what is under way and the thread."""
        if self._thread.is_alive():
            self.post(self._ending.set)
            self._thread.join()

    # ------------------------------------------------------------ on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self.up.clear()
            self._begun.set()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        self.order, self._ending = asyncio.Lock(), asyncio.Event()
        keeper = asyncio.create_task(self._keep())
        self._begun.set()
        try:
            await self._ending.wait()
        finally:
            self.up.clear()
            ending = [keeper, *self._tasks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self.client.close()

    async def _count(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await work

    def _wake(self) -> None:
        self._news = True
        link = self.client.flows.link
        if link is not None:
            link.news.set()

    async def _keep(self) -> None:
        while True:
            link = self.client.flows.link
            if link is None or link.closed:
                self.up.clear()
                await self._connect()
            elif not self.up.is_set():
                await self._probe(link)
            else:
                self._news = False
                periods = [found.lease.ttl_s / 3 for found in self._found if found.lease is not None]
                await link.wait_until(lambda: self._news, min([RENEW_SECONDS_MAX, *periods]))
                await self._renew()

    async def _connect(self) -> None:
        try:
            await self.client.connection()
        except KVStoreError as error:
            self.client.flows.note("connect", error)
            left = self.client.state.seconds_to_attempt(self.client.flows.clock.now())
            await asyncio.sleep(max(0.01, left))
        else:
            self.up.set()

    async def _probe(self, link: Any) -> None:
        """Half open: one call, of which nothing hangs."""
        failures = 0
        while not link.closed:
            operation = next(self.client.operations.reopen(), None)
            try:
                if operation is not None:
                    await self.client.drive(self.client.flows.on(link, operation))
            except KVStoreError as error:
                failures += 1
                self.client.flows.note("probe", error)
                await asyncio.sleep(self.client.options.backoff.pause_s(failures))
            else:
                log.warning("the daemon answers again")
                self.up.set()
                return

    async def _renew(self) -> None:
        for found in list(self._found):
            lease = found.lease
            if lease is None or self.client.flows.clock.now() - lease.renewed < lease.ttl_s / 4:
                continue
            try:
                await self.client.drive(self.client.flows.gets.renew(lease))
            except KVStoreError as error:
                self.failed("Leases/RenewLease", error)
                found.lost = True
                self._found.discard(found)
