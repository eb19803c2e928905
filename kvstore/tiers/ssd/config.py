"""Settings of the SSD tier, each with its default and what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import InvalidArgument

MIB: Final = 1 << 20
PAGE_BYTES: Final = 4096
CAPACITY_BYTES_MIN: Final = 1 * MIB
SEGMENTS_MIN: Final = 16
"""A directory is cut into at least this many segments, so that reclaim has something to choose from."""
SEGMENTS_MAX: Final = 512
"""Segments stay open while the tier is open: this many descriptors at most, far below common limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig:
    """How the SSD tier uses its directory. Sizes in bytes, times in seconds.

    Invalid values raise ``InvalidArgument`` naming the field.
    """

    capacity_bytes: int
    """The hard cap: ``du`` of the directory never exceeds it, metadata, temporary files and quarantine included."""

    free_floor_bytes: int = 0
    """Free space of the filesystem that is never used, for others on the same disk."""

    segment_bytes: int = 1 << 30
    """Size of a segment file; less under a small cap (at least 16 segments), more under a large one (at most 512)."""

    io_bytes: int = 4 * MIB
    """Largest single read or write; a multiple of 4,096."""

    read_bytes_in_flight: int = 64 * MIB
    """Bytes of reads under way at once; also the size of the aligned read buffers, allocated once."""

    write_bytes_in_flight: int = 32 * MIB
    """The same for writes, apart from reads, so that reads never wait behind writes."""

    read_threads: int = 16
    write_threads: int = 8

    io_deadline_s: float = 5.0
    """An I/O or sync that takes longer counts as a stalled device: its callers get a miss and the tier degrades."""

    probe_interval_s: float = 1.0
    """While degraded, a small write and read is tried this often; success brings the tier back."""

    read_errors_max: int = 3
    """Reads failing one after another before reads are refused until the probe succeeds."""

    commit_interval_s: float | None = 0.2
    """Blocks written without ``durable`` are synced after at most this long; None leaves it to ``flush``."""

    journal_bytes: int = 16 * MIB
    """Journal bytes after which a checkpoint is written; at most 1/64 of the cap."""

    header_cache_bytes: int = 16 * MIB
    """Memory for checksums of extents read or written lately; without them a first read costs one more I/O."""

    fragmentation: float = 0.3
    """Dead share of the segments above which live blocks are moved together; 0 < share <= 1."""

    compact_interval_s: float | None = 1.0
    """How often fragmentation is looked at in the background; None leaves it to ``compact`` and ``reclaim``."""

    quarantine_bytes: int = 64 * MIB
    """Most bytes kept aside; at most 1/64 of the cap. Beyond it only the cause is logged."""

    recovery: str = "normal"
    """ "normal" sets damage aside and goes on; "strict" refuses to start on damage that a crash does not explain."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < CAPACITY_BYTES_MIN:
            raise InvalidArgument("ssd.capacity_bytes", self.capacity_bytes, f"at least {CAPACITY_BYTES_MIN}")
        if self.free_floor_bytes < 0:
            raise InvalidArgument("ssd.free_floor_bytes", self.free_floor_bytes, "0 or more")
        for name in ("io_bytes", "segment_bytes"):
            value = getattr(self, name)
            if value < 16 * PAGE_BYTES or value % PAGE_BYTES:
                raise InvalidArgument(f"ssd.{name}", value, "a multiple of 4096, at least 65536")
        for name in ("read_bytes_in_flight", "write_bytes_in_flight"):
            if getattr(self, name) < self.io_bytes:
                raise InvalidArgument(f"ssd.{name}", getattr(self, name), f"at least io_bytes, {self.io_bytes}")
        for name in ("read_threads", "write_threads", "read_errors_max", "journal_bytes"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"ssd.{name}", getattr(self, name), "at least 1")
        for name in ("io_deadline_s", "probe_interval_s"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"ssd.{name}", getattr(self, name), "more than 0")
        if not 0 < self.fragmentation <= 1:
            raise InvalidArgument("ssd.fragmentation", self.fragmentation, "a share, 0 < share <= 1")
        if self.recovery not in ("normal", "strict"):
            raise InvalidArgument("ssd.recovery", repr(self.recovery), '"normal" or "strict"')

    @property
    def segment_size(self) -> int:
        """Bytes of a new segment under this cap."""
        least = -(-self.capacity_bytes // SEGMENTS_MAX)
        size = min(max(self.segment_bytes, least), self.capacity_bytes // SEGMENTS_MIN)
        return size // PAGE_BYTES * PAGE_BYTES

    @property
    def journal_limit(self) -> int:
        """Journal bytes after which a checkpoint is due."""
        return max(PAGE_BYTES, min(self.journal_bytes, self.capacity_bytes // 64))

    @property
    def quarantine_limit(self) -> int:
        """Most bytes kept aside."""
        return min(self.quarantine_bytes, self.capacity_bytes // 64)
