"""``kvengine serve``: the engine behind HTTP, until a signal ends it."""

from __future__ import annotations

import signal
import socket
import time

import uvicorn

from kvstore.core.errors import InvalidArgument
from kvstore.engine.service.app import Service
from kvstore.engine.service.driver import Driver
from kvstore.engine.service.metrics import Metrics
from kvstore.tools.kvengine.opening import OK, STARVED, ended, opened_engine
from kvstore.tools.kvengine.serve_options import ServeOptions
from kvstore.tools.output import Format, Printer


def run(options: ServeOptions) -> int:
    """Load, listen, answer; returns the exit code."""
    printer = Printer(Format.TABLE)
    # As Ctrl-C: whatever is open is closed in order. While it serves, uvicorn takes both, and raises them again.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return ended(lambda: _run(options, printer), printer)


def _run(options: ServeOptions, printer: Printer) -> int:
    # Before the model is loaded, which takes long: a port that is taken is told at once.
    with (
        _listening(options.host, options.port) as listener,
        opened_engine(options.engine, printer) as (engine, model),
    ):
        metrics = Metrics(engine, options.engine.token_budget)
        server = _Server(options.drain_s)
        driver = Driver(engine, options.limits, metrics, on_failure=server.leave)
        name = options.name or model.spec.model
        service = Service(engine, model, driver, metrics, options.limits, name, options.keys, int(time.time()))
        driver.start()
        try:
            host, port = listener.getsockname()[:2]
            printer.talk(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            server.answer(service, listener)
        finally:
            driver.stop()
    if driver.failed:
        printer.talk(f"error: {driver.failed}", style="red")
        return STARVED
    return OK


class _Server:
    """uvicorn, and a way to end it from the engine's thread."""

    def __init__(self, drain_s: int) -> None:
        self._drain_s = drain_s
        self._server: uvicorn.Server | None = None
        self._left = False

    def answer(self, service: Service, listener: socket.socket) -> None:
        """Serve until a signal, or until ``leave``."""
        config = uvicorn.Config(
            service.app(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=self._drain_s,
            h11_max_incomplete_event_size=64 << 10,
        )
        self._server = uvicorn.Server(config)
        self._server.should_exit = self._left
        try:
            self._server.run(sockets=[listener])
        except KeyboardInterrupt:
            # uvicorn has ended in order, and raises the signal again.
            return

    def leave(self) -> None:
        """End it; for any thread."""
        self._left = True
        if self._server is not None:
            self._server.should_exit = True


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InvalidArgument, naming the address, where that can not be."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise InvalidArgument("--host, --port", f"{host}:{port}", f"an address to listen on ({error})") from error
    return listener
