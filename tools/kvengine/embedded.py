"""A store inside this process: the same tiers as the daemon's, for one engine, gone with it but for the SSD tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.cache import Cache
from kvstore.core.errors import InvalidArgument
from kvstore.store.embedded import build_store
from kvstore.tiers.ssd import SsdConfig, SsdTier

MIB = 1 << 20


@contextmanager
def embedded_cache(device_mib: int, host_mib: int, ssd: Path | None, ssd_mib: int) -> Iterator[Cache]:
    """Open a store of these sizes and one session with it; both are closed at the end, the SSD tier flushed."""
    for name, value, least in (("--device-mib", device_mib, 0), ("--host-mib", host_mib, 1), ("--ssd-mib", ssd_mib, 1)):
        if value < least:
            raise InvalidArgument(name, value, f"at least {least}")
    disk = SsdTier(str(ssd), SsdConfig(capacity_bytes=ssd_mib * MIB)) if ssd is not None else None
    store = build_store(host_bytes=host_mib * MIB, device_bytes=device_mib * MIB, disk=disk)
    try:
        cache = store.open_session("kvengine", buffer_bytes=64 << 20)
        try:
            yield cache
            cache.flush()
        finally:
            cache.close()
    finally:
        store.close()
