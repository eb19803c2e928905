"""Builds tiers and store from the configuration, and takes them down if one of them can not be built."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.clock import Clock
from kvstore.core.types import Area
from kvstore.daemon.config import Config
from kvstore.rpc.arenas import ArenaExport
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.get import JobDone
from kvstore.store.store import Store
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdConfig, SsdTier


@dataclass(frozen=True, slots=True)
class Tiers:
    """What the store runs on."""

    host: HostArena
    device: MemfdDeviceArena | None
    disk: SsdTier | None

    def exports(self) -> list[ArenaExport]:
        """What clients may map."""
        exports = []
        if self.device is not None:
            exports.append(ArenaExport(Area.DEVICE, self.device.mapped_bytes, self.device.fd, writable=True))
        exports.append(ArenaExport(Area.HOST, self.host.mapped_bytes, self.host.fd, writable=False))
        return exports

    def close(self) -> None:
        """Give everything back, the disk last."""
        if self.device is not None:
            self.device.close()
        self.host.close()
        if self.disk is not None:
            self.disk.close()


def build_tiers(config: Config, clock: Clock) -> Tiers:
    """Take the directory first, since another daemon may hold it; then fault the memory in."""
    disk = None
    if config.ssd and config.ssd_dir is not None:
        settings = SsdConfig(capacity_bytes=config.ssd, free_floor_bytes=config.ssd_free_floor)
        disk = SsdTier(str(config.ssd_dir), settings, clock)
    device = None
    try:
        device = MemfdDeviceArena(config.device) if config.device else None
        return Tiers(HostArena(config.host), device, disk)
    except BaseException:
        if device is not None:
            device.close()
        if disk is not None:
            disk.close()
        raise


def build_store(config: Config, tiers: Tiers, clock: Clock, on_job_done: JobDone) -> Store:
    """The store over the tiers; not started."""
    marks = Watermarks(config.high_watermark, config.low_watermark)
    settings = StoreConfig(
        device=marks,
        host=marks,
        ssd=marks,
        loader_threads=config.loader_threads,
        writer_threads=config.writer_threads,
        sessions_max=config.sessions_max,
        lease_ttl_ms_max=config.lease_ttl_max_s * 1000,
        buffer_bytes_max=config.buffer_max,
    )
    return Store(settings, host=tiers.host, device=tiers.device, disk=tiers.disk, clock=clock, on_job_done=on_job_done)
