"""Calls between Python functions in one put, get, match and fetch: counted, so that they can not creep.

The daemon runs in this process, on threads of its own; ``sys.setprofile`` counts each call (and each step of a
generator) of a function written in Python, in the caller's thread for the client and in all others for the daemon; and
apart from that those of this project's files alone, without asyncio's, threading's and what dataclasses are made of.
Counts hardly depend on the machine, so they can be compared where times can not.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final

import kvstore
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

OWN_BEFORE: Final = {"put": (109, 224), "get": (98, 105), "match": (27, 30), "fetch": (35, 66)}
"""The same of the project's own files, as they were counted when half of them was set as the target."""

OWN: Final = f"{Path(kvstore.__file__).parent}/"
"""Where this project's files lie."""


class Counter:
    """Calls by side. One round is not exact: the daemon may still work when the client has its answer, and housekeeping
    comes between. A median over rounds is."""

    def __init__(self) -> None:
        self.client_thread = threading.get_ident()
        self.counts = [0] * 4
        """Of client and daemon; then the own ones among them."""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """The profile function."""
        if event == "call":
            side = int(threading.get_ident() != self.client_thread)
            self.counts[side] += 1
            self.counts[2 + side] += frame.f_code.co_filename.startswith(OWN)


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


def count_calls(rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Calls of client and daemon, and the own ones of each, by operation: put and get of a block, match of 512
    keys, fetch of 64."""
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
            "match": lambda: client.run(client.operations.match(namespace, chain.keys)),
            "fetch": lambda: client.fetch(namespace, chain.keys[:64], Target.IN_PLACE, lease_id=lease),
        }
        return {name: _median(counter, operation, rounds) for name, operation in operations.items()}


def _median(counter: Counter, operation: Callable[[], object], rounds: int) -> list[float]:
    for _ in range(4):
        operation()
    seen = [list(counter.counts)]
    sys.setprofile(counter)
    try:
        for _ in range(rounds):
            operation()
            seen.append(list(counter.counts))
    finally:
        sys.setprofile(None)
    columns = zip(*seen, strict=True)
    return [median(later - before for before, later in pairwise(column)) for column in columns]


def run_calls() -> list[Row]:
    """The rows of ``kvbench store`` about calls."""
    rows = []
    for name, (client, daemon, own_client, own_daemon) in count_calls().items():
        before, own = BEFORE[name], OWN_BEFORE[name]
        target = f"<= {before[0] // 2} + {before[1] // 2}; own <= {own[0] // 2} + {own[1] // 2}"
        sides = {"client": client, "daemon": daemon, "own_client": own_client, "own_daemon": own_daemon}
        rows.append(
            Row(
                bench="store",
                case=f"Python calls of a {name}, client + daemon",
                value=client + daemon,
                unit="calls",
                limit=float(sum(before)),
                limit_unit="calls",
                limit_name="the first build",
                target=target,
                conditions={**{side: round(count, 1) for side, count in sides.items()}, "rounds": ROUNDS},
            )
        )
    return rows
