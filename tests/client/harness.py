"""A daemon for tests, as a process or as a thread, and small blocks to put into it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.client import Client, PutBlocks
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.daemon.config import Config
from kvstore.daemon.daemon import Daemon
from kvstore.v1 import admin_pb2

READY_SECONDS = 30
TOKENS = 16


def small_spec(**changes: object) -> NamespaceSpec:
    """Three layers of 4 KiB + 512 bytes: slices with padding between them in memory, 16 tokens a block."""
    fields: dict[str, object] = {
        "model": "tiny",
        "dtype": "float16",
        "layers": 3,
        "kv_heads": 1,
        "head_dim": 36,
        "block_tokens": TOKENS,
    }
    return NamespaceSpec(**{**fields, **changes})


def chain(namespace: NamespaceId, blocks: int, *, seed: int = 0) -> tuple[list[BlockKey], list[int]]:
    """Keys and token ids of a chain."""
    tokens = [(seed * 7919 + i) % 50_000 for i in range(blocks * TOKENS)]
    return chain_keys(namespace, tokens, TOKENS), tokens


def payload(layout: BlockLayout, key: BlockKey) -> bytes:
    """Bytes that belong to this key and no other."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).bytes(layout.layers * layout.slice_bytes)


def blocks_of(layout: BlockLayout, keys: list[BlockKey], **more: object) -> PutBlocks:
    """The blocks of a whole chain, ready to put."""
    return PutBlocks(keys, parents_of(keys), [payload(layout, key) for key in keys], **more)  # type: ignore[arg-type]


class DaemonProcess:
    """``kvstored`` as users run it. ``start`` again after ``kill`` serves the same paths."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.socket = folder / "kvstored.sock"
        self.arguments = [
            f"--socket={self.socket}", "--device=4MiB", "--host=16MiB", "--ssd-free-floor=0", "--device-kind=shared",
            *arguments,
        ]  # fmt: skip
        self.lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Return when it says ready; RuntimeError with its log if it does not."""
        self.lines = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.daemon.main", *self.arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, ready), daemon=True)
        self._reader.start()
        if not ready.wait(READY_SECONDS) or not any(" ready: " in line for line in self.lines):
            raise RuntimeError("kvstored did not get ready:\n" + "".join(self.lines))

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        for line in process.stderr or ():
            self.lines.append(line)
            if " ready: " in line:
                ready.set()
        ready.set()

    @property
    def pid(self) -> int:
        """Process id."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    @property
    def port(self) -> int:
        """TCP port of gRPC."""
        line = next(line for line in self.lines if " ready: " in line)
        return int(line.partition("TCP port ")[2].split(",")[0])

    def signal(self, number: int) -> int:
        """Send a signal and return the exit status."""
        if self._process is None:
            raise RuntimeError("not started")
        self._process.send_signal(number)
        status = self._process.wait(READY_SECONDS)
        if self._reader is not None:
            self._reader.join()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._process = None
        return status

    def stop(self) -> int:
        """SIGTERM."""
        return self.signal(signal.SIGTERM) if self._process is not None else 0

    def kill(self) -> int:
        """SIGKILL."""
        return self.signal(signal.SIGKILL)


@contextlib.contextmanager
def daemon_thread(config: Config, clock: object = None) -> Iterator[Daemon]:
    """A daemon in this process, on a loop of its own."""
    ready = threading.Event()
    failure: list[BaseException] = []
    holder: list[Daemon] = []

    async def serve() -> None:
        daemon = Daemon(config, clock=clock, on_ready=ready.set)  # type: ignore[arg-type]
        holder.append(daemon)
        await daemon.run()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="daemon")
    thread.start()
    try:
        if not ready.wait(READY_SECONDS) or failure:
            raise RuntimeError("the daemon did not get ready") from (failure[0] if failure else None)
        yield holder[0]
    finally:
        if holder:
            with contextlib.suppress(RuntimeError):
                holder[0].stop()
        thread.join(READY_SECONDS)
    if failure:
        raise failure[0]


def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Ask again and again until it is so; AssertionError if it never is."""
    pause = threading.Event()
    tries = int(seconds / 0.02)
    for _ in range(tries):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("the condition did not come true")


def leftovers() -> set[str]:
    """Names in /dev/shm and /tmp that look like ours."""
    found = set()
    for folder in ("/dev/shm", "/tmp"):
        found |= {f"{folder}/{name}" for name in os.listdir(folder) if "kvstore" in name.lower()}
    return found


def ask(client: Client, name: str, kind: Any) -> Any:
    """The answer of an admin call that has no arguments."""
    return kind.FromString(client.connection()[0].call(f"kvstore.v1.Admin/{name}", b"", 10.0))


def rights(client: Client) -> tuple[int, int]:
    """What is held by anybody: pinned copies and reservations."""
    status = ask(client, "Status", admin_pb2.StatusResponse)
    return status.counters["copies_pinned"], status.reservations
