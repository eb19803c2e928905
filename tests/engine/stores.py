"""Stores in this process, sized in blocks of a model, with arenas full of NaN: a byte that nobody wrote shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Tier
from kvstore.store.config import StoreConfig
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdConfig, SsdTier

PAGE = 4096


@dataclass(frozen=True)
class Sizes:
    """Capacity of each tier in whole blocks; ``device`` and ``ssd`` 0 mean no such tier."""

    device: int
    host: int
    ssd: int = 0


@contextmanager
def open_store(
    spec: NamespaceSpec, sizes: Sizes, folder: Path | None = None, config: StoreConfig | None = None
) -> Iterator[Store]:
    """A started store; what is on SSD in ``folder`` is kept for the next one."""
    layout = BlockLayout.of(spec)
    host = HostArena(sizes.host * layout.raw_stored_bytes)
    device = MemfdDeviceArena(sizes.device * layout.device_bytes) if sizes.device else None
    for arena in (host, device) if device is not None else (host,):
        np.frombuffer(arena.view(0, arena.capacity_bytes), np.uint8)[:] = 0xFF
    disk = None
    if sizes.ssd and folder is not None:
        capacity = max(64 << 20, 2 * sizes.ssd * layout.raw_stored_bytes)
        disk = SsdTier(str(folder), SsdConfig(capacity_bytes=capacity))
    store = Store(config or StoreConfig(), host=host, device=device, disk=disk)
    store.start()
    try:
        yield store
    finally:
        store.close()


@contextmanager
def open_cache(store: Store, buffer_bytes: int = 64 << 20) -> Iterator[Session]:
    """A session with the store."""
    cache = store.open_session("test", buffer_bytes=buffer_bytes)
    try:
        yield cache
    finally:
        cache.close()


def clear_tier(store: Store, tier: Tier) -> None:
    """Demote or drop everything from a tier; nobody may pin anything in it."""
    (found,) = [t for t in store.status().tiers if t.tier is tier]
    if found.used_bytes:
        store.evict(tier, nbytes=found.used_bytes)


def pinned_bytes(store: Store) -> dict[str, int]:
    """Bytes that leases pin, by tier."""
    return {tier.tier.name: tier.pinned_bytes for tier in store.status().tiers}
