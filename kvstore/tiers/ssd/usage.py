"""The ledger for people: what ``du`` says, and what of it lives."""

from __future__ import annotations

from kvstore.tiers.base import DiskUsage
from kvstore.tiers.maintained import SegmentUsage
from kvstore.tiers.ssd.core import Core
from kvstore.tiers.ssd.quarantine import Quarantine


def measure_usage(core: Core, quarantine: Quarantine) -> DiskUsage:
    """Look at every file again, and report."""
    free = core.call("statvfs", core.port.free_bytes)
    core.call("du", lambda: refresh_ledger(core))
    with core.lock:
        size = sum(one.used_bytes for one in core.segments.values())
        live = sum(one.live_bytes for one in core.segments.values())
        user, rewritten = core.counters["user_bytes"], core.counters["rewritten_bytes"]
        return DiskUsage(
            directory=core.port.directory,
            cap_bytes=core.config.capacity_bytes,
            ledger_bytes=core.ledger.total_bytes,
            free_floor_bytes=core.config.free_floor_bytes,
            filesystem_free_bytes=free,
            quarantine_bytes=quarantine.total_bytes,
            metadata_bytes=core.ledger.metadata_bytes,
            live_bytes=live,
            fragmentation=1 - live / size if size else 0.0,
            write_amplification=(user + rewritten) / user if user else 1.0,
            coded_saved_bytes=core.saved_bytes,
        )


def measure_segments(core: Core) -> list[SegmentUsage]:
    """Every segment by number, as it is known."""
    with core.lock:
        segments = sorted(core.segments.values(), key=lambda one: one.number)
        return [
            SegmentUsage(one.number, one.file_bytes, one.live_bytes, one.blocks, one.open, one.used_bytes)
            for one in segments
        ]


def refresh_ledger(core: Core) -> None:
    """Compare the ledger with the files; those removed from outside no longer count."""
    with core.lock:
        names = core.ledger.names()
        segments = [*core.segments.values(), *core.spares]
    for name in names:
        try:
            allocated = core.port.stat(name).allocated
        except FileNotFoundError:
            with core.lock:
                core.ledger.remove_file(name)
            continue
        with core.lock:
            if name in core.ledger.names():
                core.ledger.set_file(name, allocated)
    for segment in segments:
        try:
            allocated = core.port.stat(segment.name).allocated
        except FileNotFoundError:
            allocated = 0
        with core.lock:
            if segment.number in core.ledger.segment_bytes:
                core.ledger.set_segment(segment.number, allocated)
