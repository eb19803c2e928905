"""Metrics over HTTP, for Prometheus, ``/healthz``, and a page for people: threads of their own, which take snapshots.

Needs prometheus-client (the extra ``daemon``). No request reaches the event loop but for the beat of ``/healthz``,
and none says anything of a tenant: no names, no keys.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from kvstore.core.errors import InvalidArgument
from kvstore.core.histogram import BOUNDS_S
from kvstore.daemon.live import Live, page
from kvstore.daemon.metrics import METRICS, Metric, Snapshot

log = logging.getLogger("kvstored")

CONNECTIONS_MAX: Final = 8
"""Requests at one time; more are closed unanswered, so that nobody costs the daemon threads without end."""

PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-ancestors 'none'"
)
"""The page has all that it needs in itself, and asks this server alone."""

IDLE_S: Final = 5.0
"""How long a connection may keep silent."""


class _Collector(Collector):
    """A snapshot, as the library's families."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Family]:
        """Nothing: else registering would take a snapshot."""
        return []

    def collect(self) -> Iterator[Family]:
        """One snapshot a scrape."""
        now = self._snapshot()
        for metric in METRICS:
            yield _family(metric, now)


def _family(metric: Metric, now: Snapshot) -> Family:
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name, metric.text)
        info.add_metric((), {"version": now.version, "boot_id": now.report.boot_id.hex()})
        return info
    if metric.kind == "histogram":
        return _histogram(metric, now)
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.text, labels=metric.labels)
    for labels, value in metric.read(now):
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, now: Snapshot) -> Family:
    family = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
    for labels, times in metric.times(now):
        within, seconds = tuple(times.within), times.seconds
        if not any(within):
            continue
        below, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), within, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric(labels, buckets, seconds)
    return family


class _Handler(BaseHTTPRequestHandler):
    """``GET`` of the two paths."""

    timeout = IDLE_S
    server: MetricsServer
    paths: ClassVar[dict[str, str]] = {
        "/": "_page", "/live.json": "_live", "/metrics": "_metrics", "/healthz": "_health",
    }  # fmt: skip

    def do_GET(self) -> None:  # noqa: N802 - the name is the library's
        """Answer one request."""
        found = self.paths.get(self.path.partition("?")[0])
        status, kind, body = getattr(self, found)() if found else (404, "text/plain", b"/, /metrics or /healthz\n")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", PAGE_POLICY)
        self.end_headers()
        self.wfile.write(body)

    def _page(self) -> tuple[int, str, bytes]:
        return 200, "text/html; charset=utf-8", page()

    def _live(self) -> tuple[int, str, bytes]:
        if not self.server.alive():
            return 503, "application/json", b"{}\n"
        return 200, "application/json", json.dumps(self.server.live.values()).encode() + b"\n"

    def _metrics(self) -> tuple[int, str, bytes]:
        return 200, CONTENT_TYPE_LATEST, generate_latest(self.server.registry)

    def _health(self) -> tuple[int, str, bytes]:
        alive = self.server.alive()
        body: dict[str, Any] = {"alive": alive}
        if alive:
            now = self.server.snapshot()
            degraded = [tier.tier.name for tier in now.report.tiers if tier.state != "ready"]
            body |= {"version": now.version, "boot_id": now.report.boot_id.hex(), "degraded": degraded}
            body["draining"] = now.report.draining
        return 200 if alive else 503, "application/json", json.dumps(body).encode() + b"\n"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
        """To the daemon's own log, and only when asked for."""
        log.debug("metrics: " + format, *args)


class MetricsServer(ThreadingHTTPServer):
    """Serves until ``close``. ``alive`` says, within moments, whether the event loop turns."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], snapshot: Callable[[], Snapshot], alive: Callable[[], bool], live: Live
    ) -> None:
        self.snapshot, self.alive, self.live = snapshot, alive, live
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(snapshot))
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise InvalidArgument("metrics_listen", where, f"an address that is free ({error.strerror})") from error
        self._thread = threading.Thread(target=self.serve_forever, name="kvstore-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """As a plain server's: the library's own asks the name service who this host is."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "kvstored", self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread a connection, as far as there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread of one connection; its room is given back however it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no event."""
        log.debug("metrics: a request was not answered", exc_info=True)

    def close(self) -> None:
        """Take no more requests."""
        self.shutdown()
        self.server_close()
        self._thread.join()
