"""Builds tiers and store from the configuration, and takes them down if one of them can not be built."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.core.clock import Clock
from kvstore.core.errors import TierError, Unavailable
from kvstore.core.types import Area
from kvstore.daemon.config import Config
from kvstore.daemon.memory import memory_room
from kvstore.rpc.arenas import ArenaExport
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.store import Store
from kvstore.store.verbs.get import JobDone
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.device_probe import DeviceChoice, choose_device
from kvstore.tiers.host import HostArena, MemfdArena, Pin
from kvstore.tiers.ssd import SsdConfig, SsdTier

if TYPE_CHECKING:
    from kvstore.tiers.device_cuda import CudaDeviceArena

log = logging.getLogger("kvstored")

Chooser = Callable[[str, int], DeviceChoice]
"""Settles ``device_kind`` and ``device_index``: ``choose_device``, or a test's own."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """What the store runs on."""

    host: HostArena
    device: MemfdDeviceArena | CudaDeviceArena | None
    disk: SsdTier | None

    def exports(self) -> list[ArenaExport]:
        """What clients may map."""
        exports = [] if self.device is None else [_device_export(self.device)]
        exports.append(_memfd_export(self.host, writable=False))
        return exports

    def close(self) -> None:
        """Give everything back, the disk last."""
        if self.device is not None:
            self.device.close()
        self.host.close()
        if self.disk is not None:
            self.disk.close()


def _memfd_export(arena: MemfdArena, *, writable: bool) -> ArenaExport:
    return ArenaExport(
        arena.area, arena.capacity_bytes, arena.fd, writable=writable, versions_offset=arena.capacity_bytes
    )


def _device_export(device: MemfdDeviceArena | CudaDeviceArena) -> ArenaExport:
    if isinstance(device, MemfdDeviceArena):
        return _memfd_export(device, writable=device.client_writable)
    return ArenaExport(
        Area.DEVICE,
        device.capacity_bytes,
        -1,
        writable=True,
        kind=device.kind,
        device=device.device,
        handle=device.ipc_handle,
    )


@contextmanager
def naming(key: str) -> Iterator[None]:
    """An error of the system says which key of the configuration it is about. Raises Unavailable for it."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{key}: {error}", field=key) from error


def build_tiers(config: Config, clock: Clock, choose: Chooser = choose_device) -> Tiers:
    """Take the directory first, since another daemon may hold it; then fault the memory in."""
    with ExitStack() as undo:
        disk = None
        if config.ssd and config.ssd_dir is not None:
            settings = SsdConfig(
                capacity_bytes=config.ssd,
                free_floor_bytes=config.ssd_free_floor,
                segment_bytes=config.ssd_segment,
                io_deadline_s=config.ssd_io_deadline_s,
                fragmentation=config.ssd_fragmentation,
                recovery=config.ssd_recovery,
            )
            with naming("ssd_dir"):
                disk = SsdTier(str(config.ssd_dir), settings, clock)
            undo.callback(disk.close)
        device, pin = _build_device(config, choose)
        if device is not None:
            undo.callback(device.close)
        tiers = Tiers(HostArena(config.host, pin=pin), device, disk)
        undo.pop_all()
        return tiers


def _build_device(config: Config, choose: Chooser) -> tuple[MemfdDeviceArena | CudaDeviceArena | None, Pin | None]:
    """The DEVICE arena, and on a GPU what pins HOST for it."""
    if not config.device:
        return None, None
    choice = choose(config.device_kind, config.device_index)
    log.log(
        logging.WARNING if choice.gpu_unused else logging.INFO, "DEVICE is %s memory: %s", choice.kind, choice.reason
    )
    if choice.kind == "cuda":
        try:
            # Loads torch, which a daemon without a GPU must not wait for.
            cuda = importlib.import_module("kvstore.tiers.device_cuda")
            runtime = cuda.load_runtime()
            return cuda.CudaDeviceArena(config.device, device=config.device_index, runtime=runtime), cuda.pin(runtime)
        except (TierError, Unavailable) as error:
            if config.device_kind == "cuda":
                raise
            log.warning("DEVICE is shared memory after all, since CUDA failed: %s", error)
    return MemfdDeviceArena(config.device), None


def build_store(config: Config, tiers: Tiers, clock: Clock, on_job_done: JobDone) -> Store:
    """The store over the tiers; not started."""
    high, low = config.high_watermark, config.low_watermark
    settings = StoreConfig(
        device=Watermarks(high, low, config.device_eviction),
        host=Watermarks(high, low, config.host_eviction),
        ssd=Watermarks(high, low, config.ssd_eviction),
        guarantees=config.promised,
        # Microseconds: no run tells so many events that the next one's numbers are not above.
        events_epoch=time.time_ns() // 1000,
        loader_threads=config.loader_threads,
        writer_threads=config.writer_threads,
        sessions_max=config.sessions_max,
        peer_share=config.peer_share,
        lease_ttl_ms_max=config.lease_ttl_max_s * 1000,
        buffer_bytes_max=config.buffer_max,
        # The arenas are there by now, so what is left is beside them.
        index_map=config.index_map,
        buffers_bytes_max=config.buffers_max or memory_room().buffers(0),
        # The daemon drains for drain_timeout_s before it closes the store; a second wait would be unannounced.
        close_flush_ms=0,
    )
    return Store(settings, host=tiers.host, device=tiers.device, disk=tiers.disk, clock=clock, on_job_done=on_job_done)
