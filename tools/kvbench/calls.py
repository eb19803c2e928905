"""Calls between Python functions in one put, get, match and fetch: counted, so that they can not creep.

The daemon runs in this process, on threads of its own; ``sys.setprofile`` counts each call (and each step of a
generator) of a function written in Python, in the caller's thread for the client and in all others for the daemon.
Counts hardly depend on the machine, so they can be compared where times can not.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import Unavailable
from kvstore.core.types import Target
from kvstore.daemon.config import Config
from kvstore.daemon.daemon import Daemon
from kvstore.tools.kvbench.rows import Row
from kvstore.tools.kvbench.workload import Chain, opaque_spec

ROUNDS: Final = 40
READY_SECONDS: Final = 30.0

BEFORE: Final = {"put": (130, 324), "get": (121, 135), "match": (39, 45), "fetch": (48, 92)}
"""What the first build took of client and daemon, counted by this module at fde8350."""


class Counter:
    """Calls by side. Not exact to the last one where threads race, which a mean over rounds evens out."""

    def __init__(self) -> None:
        self.client_thread = threading.get_ident()
        self.client = 0
        self.daemon = 0

    def __call__(self, _frame: FrameType, event: str, _argument: Any) -> None:
        """The profile function."""
        if event == "call":
            if threading.get_ident() == self.client_thread:
                self.client += 1
            else:
                self.daemon += 1


@contextmanager
def counted_daemon(counter: Counter) -> Iterator[Path]:
    """A daemon on threads whose calls are counted; the socket's path."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        socket = Path(folder) / "s"
        values = {"socket": socket, "host": 64 << 20, "device": 0, "grpc": False, "watchdog_s": 600.0}
        config = Config.model_validate(values)
        ready, holder = threading.Event(), list[Daemon]()

        async def serve() -> None:
            holder.append(Daemon(config, on_ready=ready.set))
            await holder[0].run()

        threading.setprofile(counter)
        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="counted daemon")
        thread.start()
        try:
            if not ready.wait(READY_SECONDS):
                raise Unavailable("the daemon of this bench did not start")
            yield socket
        finally:
            threading.setprofile(None)
            holder[0].stop()
            thread.join(READY_SECONDS)


def count_calls(rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Mean calls of client and daemon, by operation: put and get of a block, match of 512 keys, fetch of 64."""
    counter = Counter()
    spec = opaque_spec("calls", block_bytes=4096)
    with (
        counted_daemon(counter) as socket,
        Client(socket, ClientOptions(strict=True, device=False, buffer_bytes=8 << 20)) as client,
    ):
        namespace = client.open_namespace(spec).namespace_id
        chain = Chain.fresh(spec, 512)
        payloads = [bytes(4096)] * 512
        client.put(namespace, PutBlocks(chain.keys, chain.parents, payloads))
        fresh = iter([Chain.fresh(spec, 1, start) for start in range(1, 2 * rounds + 9)])
        lease = client.grant_lease("kvbench calls", 600_000)
        out = bytearray(4096)

        def put() -> None:
            one = next(fresh)
            client.put(namespace, PutBlocks(one.keys, one.parents, payloads[:1]))

        operations: dict[str, Callable[[], object]] = {
            "put": put,
            "get": lambda: client.get(namespace, chain.keys[:1], out=out),
            "match": lambda: client.match(namespace, chain.keys),
            "fetch": lambda: client.fetch(namespace, chain.keys[:64], Target.IN_PLACE, lease_id=lease),
        }
        return {name: _mean(counter, operation, rounds) for name, operation in operations.items()}


def _mean(counter: Counter, operation: Callable[[], object], rounds: int) -> tuple[float, float]:
    for _ in range(4):
        operation()
    client, daemon = counter.client, counter.daemon
    sys.setprofile(counter)
    try:
        for _ in range(rounds):
            operation()
    finally:
        sys.setprofile(None)
    return (counter.client - client) / rounds, (counter.daemon - daemon) / rounds


def run_calls() -> list[Row]:
    """The rows of ``kvbench store`` about calls."""
    rows = []
    for name, (client, daemon) in count_calls().items():
        before = BEFORE.get(name)
        target = f"<= {before[0] / 2:.0f} + {before[1] / 2:.0f}" if before else ""
        rows.append(
            Row(
                bench="store",
                case=f"Python calls of a {name}, client + daemon",
                value=client + daemon,
                unit="calls",
                limit=float(sum(before)) if before else None,
                limit_unit="calls" if before else "",
                limit_name="the first build",
                target=target,
                conditions={"client": round(client, 1), "daemon": round(daemon, 1), "rounds": ROUNDS},
            )
        )
    return rows
