"""Readers that outlive their leases: stopped in the midst of a get, or with a view that they keep too long."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import DeadlineExceeded
from kvstore.core.types import Outcome
from kvstore.tools.chaos.ground import Ground, Tenant, chain

TTL_MS: Final = 500
LARGE: Final = 3
"""Index of the size with the largest blocks: copying them takes long enough to be stopped in."""


def stopped_reader(ground: Ground) -> None:
    """A process is stopped inside ``get`` for longer than its lease lives; meanwhile others take its memory."""
    tenant = Tenant.of(1, LARGE)
    writer = ground.client([tenant], strict=True, buffer_bytes=40 << 20)
    blocks = 16
    keys = chain("stopped", blocks)
    writer.put(tenant.id, tenant.blocks(keys))
    target = ground.folder / "target"
    target.write_bytes(bytes(blocks * tenant.nbytes))
    command = [sys.executable, "-m", "kvstore.tools.chaos.lapses", str(ground.daemon.socket), str(target), str(blocks)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with target.open("r+b") as file, mmap.mmap(file.fileno(), 0) as seen:
            at = ground.rng.randrange(1, blocks - 4) * tenant.nbytes
            deadline = time.monotonic() + 20
            while seen[at : at + 16] == bytes(16) and reader.poll() is None and time.monotonic() < deadline:
                pass
        reader.send_signal(signal.SIGSTOP)
        time.sleep(TTL_MS / 1000 + 0.6)
        ground.fill(writer, tenant, "after stop", 48 << 20)
        reader.send_signal(signal.SIGCONT)
        told = (reader.communicate(timeout=30)[0].split() or ["0", "0"])[-2:]
    finally:
        reader.kill()
        reader.wait()
        writer.close()
        target.unlink()
    ground.findings.hits += int(told[0])
    if int(told[1]):
        words = f"stopped inside get past its lease: {told[1]} of {told[0]} HITs"
        ground.findings.add("wrong bytes: a get that outlived its lease", words, int(told[1]))


def views_kept(ground: Ground) -> None:
    """A view in place is kept longer than the lease's time; it may end, but then it has to say so."""
    tenant = Tenant.of(1, ground.rng.choice((2, LARGE)))
    keys = chain("kept", 4)
    reader = ground.client([tenant], strict=True, lease_ttl_ms=TTL_MS)
    writer = ground.client([tenant], strict=True, buffer_bytes=40 << 20)
    writer.put(tenant.id, tenant.blocks(keys))
    try:
        seen, believed = list[bytes | None]([None] * len(keys)), False
        # On a machine that was too busy to renew the lease in time it ends, and the end of the view says so.
        with suppress(DeadlineExceeded), reader.get_in_place(tenant.id, keys) as views:
            time.sleep(TTL_MS / 1000 + 0.5)
            ground.fill(writer, tenant, "after view", 48 << 20)
            seen = [None if view is None else b"".join(bytes(part) for part in slices(view)) for view in views]
            believed = held(views)
        outcomes = [Outcome.MISS if view is None else Outcome.HIT for view in seen]
        wrong = tenant.wrong(keys, outcomes, seen)
        ground.findings.hits += sum(view is not None for view in seen)
        if wrong and believed and not reader.failures():
            words = f"{len(wrong)} of {len(keys)} views, and nobody was told"
            ground.findings.add("wrong bytes: a view that outlived its lease", words, len(wrong))
    finally:
        reader.close()
        writer.close()


def slices(view: Any) -> list[memoryview]:
    """A view's bytes, layer by layer."""
    return [view.slice(layer) for layer in range(view.layout.layers)]


def held(views: Any) -> bool:
    """Whether the views say that they held; builds whose views can not say so are believed."""
    say = getattr(views, "held", None)
    return bool(say()) if say is not None else all(getattr(v, "held", lambda: True)() for v in views if v is not None)


def read(arguments: Sequence[str]) -> None:
    """The process that is stopped: one get into the file, then how many HITs, and how many of them are wrong."""
    socket, target, blocks = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    tenant, keys = Tenant.of(1, LARGE), chain("stopped", blocks)
    options = ClientOptions(lease_ttl_ms=TTL_MS, copy_threads=1, buffer_bytes=1 << 20)
    with target.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory, Client(socket, options) as client:
        client.open_namespace(tenant.spec)
        got = client.get(tenant.id, keys, out=memoryview(memory), wait_ms=2000)
        wrong = tenant.wrong(keys, got.outcomes, got.payloads)
        print(sum(outcome is Outcome.HIT for outcome in got.outcomes), len(wrong), flush=True)
        os._exit(0)


if __name__ == "__main__":
    read(sys.argv[1:])
