"""The composition root: tiers, store, servers, joined and run until a signal; then taken down in order.

Order of start: socket lock, SSD directory, memory, recovery, session socket, gRPC, "ready". Order of the end:
no new blocks, sessions closed, what is in memory written to SSD, a checkpoint, sockets removed. After ``kill -9``
nothing is left but the socket files, which the next daemon replaces.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstore import __version__
from kvstore.cache import FetchResult
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import JobId, SessionId
from kvstore.daemon.build import Tiers, build_store, build_tiers, naming
from kvstore.daemon.collector import Collector
from kvstore.daemon.config import Config, format_size, notify_address
from kvstore.daemon.metrics import Snapshot
from kvstore.daemon.notify import notify
from kvstore.daemon.rights import make_tls, reload
from kvstore.daemon.selftest import self_test
from kvstore.daemon.turns import Turns
from kvstore.daemon.watchdog import Watchdog
from kvstore.rpc.access import Access
from kvstore.rpc.context import Services
from kvstore.rpc.dispatch import Dispatcher
from kvstore.rpc.grpc_server import GrpcServer
from kvstore.rpc.listener import SocketLock, check_socket_path
from kvstore.rpc.session_server import SessionServer, SocketOptions
from kvstore.rpc.sessions import Sessions
from kvstore.store.store import Store

if TYPE_CHECKING:
    from kvstore.daemon.exposition import MetricsServer

log = logging.getLogger("kvstored")

EXPIRY_PERIOD_S: Final = 0.5
GRPC_GRACE_S: Final = 2.0
"""How long calls over gRPC may go on after SIGTERM; never longer than ``drain_timeout_s``."""

BEAT_S: Final = 2.0
"""How long ``/healthz`` waits for a turn of the event loop."""


class Daemon:
    """One run of kvstored. ``on_ready`` is called on the loop's thread when clients are served."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        on_ready: Callable[[], None] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._on_ready = on_ready
        self._turns = turns or Turns()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions_server: SessionServer | None = None
        self.grpc_port = self.metrics_port = 0
        self._reload: Callable[[], None] | None = None

    def stop(self) -> None:
        """End the run. Safe from any thread once ``on_ready`` was called."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or ``stop``. Raises domain errors if it can not start."""
        self._loop = asyncio.get_running_loop()
        # From the first moment: a start may take minutes, and a signal then ends it in order, behind the recovery.
        self._handle_signals()
        began = time.monotonic()
        config = self._config
        with naming("socket"):
            config.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_socket_path(config.grpc_socket)
            lock = SocketLock(config.socket)
        try:
            tiers = await asyncio.to_thread(build_tiers, config, self._clock)
            store = build_store(config, tiers, self._clock, self._job_done)
            try:
                await asyncio.to_thread(store.start)
                await asyncio.to_thread(self_test, tiers)
                if not self._stop.is_set():
                    await self._serve(store, tiers, began)
            finally:
                await asyncio.to_thread(store.close)
                tiers.close()
            log.info("stopped")
        finally:
            lock.release()

    async def _serve(self, store: Store, tiers: Tiers, began: float) -> None:
        config = self._config
        access = Access(config.policy)
        tls = make_tls(config)
        sessions = Sessions(store, self._clock, access)
        dispatcher = Dispatcher(Services(store, sessions, __version__, os.getpid(), looked_at=self._turns.counters))
        admins = frozenset({0, os.getuid(), *config.admin_uids})
        trusted = frozenset({0, os.getuid(), *config.device_uids})
        options = SocketOptions(config.socket, config.socket_mode, admins, trusted)
        server = SessionServer(dispatcher, tiers.exports(), options)
        grpc_server = GrpcServer(
            dispatcher,
            socket=config.grpc_socket if config.grpc else None,
            listen=config.listen,
            mode=config.socket_mode,
            tls=tls,
        )
        self._reload = lambda: reload(access, tls, sessions, server)
        watchdog = Watchdog(config.watchdog_s)
        metrics: MetricsServer | None = None
        expiry: asyncio.Task[None] | None = None
        try:
            with naming("socket"):
                await server.start()
            self._sessions_server = server
            if config.grpc or config.listen:
                await grpc_server.start()
                self.grpc_port = grpc_server.port
            metrics = self._metrics(dispatcher)
            loop = asyncio.get_running_loop()
            watchdog.start(loop)
            expiry = loop.create_task(self._expire(sessions, dispatcher))
            self._tell_ready(store, grpc_server.port, began)
            await self._stop.wait()
            notify(notify_address(), "STOPPING=1")
        finally:
            if expiry is not None:
                expiry.cancel()
            await self._take_down(store, server, grpc_server)
            if metrics is not None:
                await asyncio.to_thread(metrics.close)
            watchdog.stop()
            await asyncio.to_thread(dispatcher.close, self._config.drain_timeout_s)

    def _metrics(self, dispatcher: Dispatcher) -> MetricsServer | None:
        """The server of metrics, if one is asked for."""
        address, services = self._config.metrics_address, dispatcher.services
        if address is None:
            return None
        # What it is made with is an extra: who asks for no metrics needs none of it.
        exposition = importlib.import_module("kvstore.daemon.exposition")

        def snapshot() -> Snapshot:
            report = services.store.status()
            counters = {**report.counters, **services.counters()}
            return Snapshot(services.version, report, counters, dispatcher.calls(), dispatcher.times.by_method())

        live = exposition.Live(snapshot, services.store)
        server: MetricsServer = exposition.MetricsServer(address, snapshot, self._turns_now, live)
        self.metrics_port = server.port
        return server

    def _turns_now(self) -> bool:
        """Whether the event loop turns within ``BEAT_S``. Called by other threads."""
        beat, loop = threading.Event(), self._loop
        if loop is None or loop.is_closed():
            return False
        loop.call_soon_threadsafe(beat.set)
        return beat.wait(BEAT_S)

    def _tell_ready(self, store: Store, port: int, began: float) -> None:
        config, status = self._config, store.status()
        for tier in status.tiers:
            log.info("%s: %s, %s", tier.tier.name, format_size(tier.capacity_bytes), tier.backing or tier.state)
        for warning in status.warnings:
            log.warning("%s", warning)
        if config.ssd:
            found = status.recovery
            log.info(
                "recovery: %d blocks, %d bytes in %.3f s; cut %d bytes, quarantined %d, orphans removed %d (%s)",
                found.blocks, found.bytes, found.seconds, found.cut_bytes, found.quarantined, found.orphans_removed,
                found.mode,
            )  # fmt: skip
        where = f"{config.socket}" + (f", gRPC at {config.grpc_socket}" if config.grpc else "")
        where += f", TCP port {port}, {'TLS' if config.tls_cert else 'plain text'}" if port else ""
        where += f", metrics at port {self.metrics_port}" if self.metrics_port else ""
        log.info(
            "ready: kvstored %s pid %d boot %s at %s, after %.2f s",
            __version__, os.getpid(), store.boot_id.hex(), where, time.monotonic() - began,
        )  # fmt: skip
        notify(notify_address(), f"READY=1\nSTATUS=serving at {config.socket}")
        if self._on_ready is not None:
            self._on_ready()

    async def _take_down(self, store: Store, server: SessionServer, grpc_server: GrpcServer) -> None:
        await grpc_server.stop(min(GRPC_GRACE_S, self._config.drain_timeout_s))
        await server.stop()
        self._sessions_server = None
        timeout_ms = self._config.drain_timeout_s * 1000
        if self._config.ssd and timeout_ms:
            report = await asyncio.to_thread(store.drain, timeout_ms=timeout_ms)
            log.info("drained: %d blocks written, %d not", report.flushed_blocks, report.unflushed_blocks)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._signalled, number)
            except (ValueError, RuntimeError):
                log.debug("signals belong to the main thread; this run ends by stop()")
                return
        # Sent to every daemon of a terminal that closes, and by habit to one that should read its file again.
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        log.info("SIGHUP: policy and certificate are read again; the configuration is read at start only")
        if self._reload is not None:
            self._reload()

    def _signalled(self, number: signal.Signals) -> None:
        log.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()

    async def _expire(self, sessions: Sessions, dispatcher: Dispatcher) -> None:
        """End remote sessions that missed their keepalive, and collect garbage in quiet moments. A failure is logged
        and the next round goes on."""
        collector = Collector(self._clock)
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            collector.tick(quiet=dispatcher.quiet)
            try:
                # Off the loop: what they held is given back.
                ended = await dispatcher.work(sessions.expire)
            except KVStoreError as error:
                log.error("remote sessions were not expired: %s", error)
            else:
                if ended:
                    log.info("%d remote sessions missed their keepalive and were ended", ended)

    def _job_done(self, session_id: SessionId, job_id: JobId, result: FetchResult) -> None:
        """Called by the store's threads."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._push, session_id, job_id, result)

    def _push(self, session_id: SessionId, job_id: JobId, result: FetchResult) -> None:
        if self._sessions_server is not None:
            self._sessions_server.job_done(session_id, job_id, result)
