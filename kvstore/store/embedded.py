"""A store in process, for embedding and for tests; its sessions meet the same contract as the client."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.clock import Clock
from kvstore.store.config import StoreConfig
from kvstore.store.store import Store
from kvstore.tiers.base import DiskTier
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import HostArena


def build_store(
    config: StoreConfig | None = None,
    *,
    host_bytes: int,
    device_bytes: int = 0,
    disk: DiskTier | None = None,
    colder: Sequence[DiskTier] = (),
    clock: Clock | None = None,
) -> Store:
    """A started store with arenas of its own; ``device_bytes`` 0 means no DEVICE tier. The caller closes it."""
    host = HostArena(host_bytes)
    device = MemfdDeviceArena(device_bytes) if device_bytes else None
    store = Store(config or StoreConfig(), host=host, device=device, disk=disk, colder=colder, clock=clock)
    store.start()
    return store
