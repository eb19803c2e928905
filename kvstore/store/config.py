"""Settings and bounds of the store. Every queue, table and message has a bound here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Tier
from kvstore.store.guarantees import Guarantee


@dataclass(frozen=True, slots=True)
class Watermarks:
    """How one tier is kept. Fractions *used*: background reclaim starts above ``high`` and stops at ``low``."""

    high: float = 0.95
    low: float = 0.90
    eviction: str = "lru"
    """Name of the policy that says which copy goes first (``eviction.py``)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high <= 1.0:
            raise InvalidArgument("watermarks", f"low {self.low}, high {self.high}", "0 < low <= high <= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Bounds and watermarks. Units stand last in the names."""

    device: Watermarks = field(default_factory=Watermarks)
    host: Watermarks = field(default_factory=Watermarks)
    ssd: Watermarks = field(default_factory=Watermarks)
    loader_threads: int = 2
    """Threads that promote for fetch and prefetch."""
    writer_threads: int = 1
    """Threads that write to SSD. With 0 of both, work waits until ``Store.run_pending`` is called (tests)."""
    guarantees: tuple[Guarantee, ...] = ()
    """Bytes that eviction leaves to tenants; together at most the low watermark of each tier."""
    sessions_max: int = 1024
    leases_max: int = 16_384
    reservations_max: int = 262_144
    jobs_max: int = 4_096
    plans_max: int = 1_024
    plans_a_session_max: int = 64
    plan_units_max: int = 1 << 25
    """Slices that all reading plans name together, 16 bytes each."""
    plan_threads: int = 4
    """Threads that read for plans."""
    plan_io_bytes: int = 4 << 20
    """Largest read of a plan."""
    namespaces_max: int = 262_144
    """Namespaces in use at one time (a block, or an open session that opened it); others are forgotten to make room.
    A name counts as one, too, and so does each KiB of a spec's text."""
    peer_share: float = 0.75
    """Part of sessions_max, leases_max, reservations_max, jobs_max, plans_max, plan_units_max, namespaces_max (those
    that sessions opened) and the buffers' bytes that one peer may take: a uid of this machine, or a remote address."""
    load_queue_max: int = 1_024
    """Jobs of fetch and prefetch waiting for a loader."""
    write_queue_max: int = 65_536
    """Blocks waiting to be written to SSD; one more is dropped from the queue and counted."""
    lease_ttl_ms_max: int = 600_000
    job_keep_ms: int = 60_000
    """How long a finished job's answer waits to be read."""
    extent_blocks_max: int = 64
    """Most blocks of one chain written to SSD together."""
    tombstones_max: int = 65_536
    """Dropped keys whose cause and time are remembered for ``why``."""
    events_max: int = 65_536
    """Blocks that the events kept for subscribers speak of."""
    events_epoch: int = 0
    """Below the first event's number; a daemon gives each start a higher one than any number before."""
    buffer_bytes_max: int = 4 << 30
    buffers_bytes_max: int = 1 << 40
    """Bytes of all sessions' buffers together; the daemon takes it from the memory that there is."""
    close_flush_ms: int = 30_000
    """Longest that a clean end takes to write to SSD what is in memory only; 0 leaves it unwritten."""
    index_map: bool = False
    """Whether sessions on this host may map the index, read-only, and match without a call."""
    tick_ms: int = 50
    """Period of the housekeeper: expiry of leases and jobs, watermarks, the disk's health."""

    def marks(self, tier: Tier) -> Watermarks:
        """How a tier is kept; storage behind SSD as SSD is."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host}.get(tier, self.ssd)

    @property
    def evictions(self) -> dict[Tier, str]:
        """Name of each tier's policy."""
        return {Tier.DEVICE: self.device.eviction, Tier.HOST: self.host.eviction, Tier.SSD: self.ssd.eviction}

    def __post_init__(self) -> None:
        for name in ("loader_threads", "writer_threads"):
            if not 0 <= getattr(self, name) <= 64:
                raise InvalidArgument(f"store.{name}", getattr(self, name), "0 to 64")
        if (self.loader_threads == 0) != (self.writer_threads == 0):
            raise InvalidArgument("store.writer_threads", self.writer_threads, "0 if and only if loader_threads is 0")
        for name in (
            "sessions_max", "leases_max", "reservations_max", "jobs_max", "namespaces_max", "load_queue_max",
            "plans_max", "plans_a_session_max", "plan_units_max", "plan_threads", "plan_io_bytes",
            "write_queue_max", "lease_ttl_ms_max", "job_keep_ms", "tombstones_max", "events_max", "tick_ms",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidArgument(f"store.{name}", getattr(self, name), "1 or more")
        for name, limit in (("leases_max", 65_535), ("namespaces_max", 1 << 24)):
            if getattr(self, name) > limit:
                raise InvalidArgument(f"store.{name}", getattr(self, name), f"at most {limit}")
        if not 0.0 < self.peer_share <= 1.0:
            raise InvalidArgument("store.peer_share", self.peer_share, "above 0, at most 1")
        if not 1 <= self.extent_blocks_max <= 64:
            raise InvalidArgument("store.extent_blocks_max", self.extent_blocks_max, "1 to 64")

    def peer_bound(self, limit: int) -> int:
        """What one peer may have of something that all together may have ``limit`` of."""
        return math.ceil(limit * self.peer_share)
