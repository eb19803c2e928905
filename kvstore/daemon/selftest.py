"""Before anybody is served: a little goes through each tier and has to come back as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from kvstore.core.errors import Unavailable
from kvstore.daemon.build import Tiers
from kvstore.tiers.base import Arena

NBYTES: Final = 1 << 16


def self_test(tiers: Tiers) -> None:
    """Raises Unavailable where memory does not keep what is written to it: nothing good can come of that start. A disk
    that fails degrades its tier instead, and the daemon serves from memory. To be called after the recovery.
    """
    host, device = tiers.host, tiers.device
    _through("HOST", host, lambda at, data: _put(host, at, data), lambda at, size: bytes(host.view(at, size)))
    if device is not None:

        def back(at: int, size: int) -> bytes:
            into = bytearray(size)
            device.read(at, memoryview(into))
            return bytes(into)

        _through("DEVICE", device, lambda at, data: device.write(at, memoryview(data)), back)
    if tiers.disk is not None:
        tiers.disk.self_test()


def _put(arena: Arena, at: int, data: bytes) -> None:
    arena.view(at, len(data))[:] = data


def _through(name: str, arena: Arena, write: Callable[[int, bytes], None], read: Callable[[int, int], bytes]) -> None:
    size = min(NBYTES, arena.capacity_bytes)
    pattern = hashlib.shake_256(name.encode()).digest(size)
    at = arena.allocate(size)
    if at is None:
        return
    try:
        write(at, pattern)
        if read(at, size) != pattern:
            raise Unavailable(
                f"the self test failed: {name} does not give back what was written to it", field=name.lower()
            )
    finally:
        arena.free(at, size)
