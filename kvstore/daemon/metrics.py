"""Every metric that is exported, as one table: name, kind, labels, what it counts, and where its values come from.

The table is what docs/operations.md lists. Each row takes the counters of Status that it names, and the last one takes
whatever no other does: a counter that is added somewhere is exported without a change here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.core.histogram import Histogram
from kvstore.rpc.times import MethodTimes
from kvstore.store.report import StatusReport

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values, each with those of the metric's labels."""

Times = Iterable[tuple[tuple[str, ...], Histogram]]
"""Histograms, each with the values of the metric's labels."""

NEVER: Final = re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment. ``counters`` are those of Status, ``calls`` the slots taken of each pool."""

    version: str
    report: StatusReport
    counters: Mapping[str, int]
    calls: Mapping[str, int]
    times: Mapping[str, MethodTimes]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. ``kind`` is gauge, counter, info or histogram; of info ``exposition.py`` makes the sample.

    ``takes`` are the counters of Status that it stands for. A histogram has ``times`` instead of values to ``read``.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    read: Callable[[Snapshot], Samples] = lambda _: ()
    takes: re.Pattern[str] = NEVER
    times: Callable[[Snapshot], Times] = lambda _: ()


def _value(name: str, text: str, field: str, kind: str = "gauge") -> Metric:
    """A field of the status report."""
    return Metric(name, kind, (), text, lambda now: [((), float(getattr(now.report, field)))])


def _tier(name: str, text: str, field: str) -> Metric:
    """A field of each tier's report."""
    return Metric(f"kvstore_tier_{name}", "gauge", ("tier",), text, lambda now: _of_tiers(now, field))


def _of_tiers(now: Snapshot, field: str) -> Samples:
    return [((tier.tier.name.lower(),), float(getattr(tier, field))) for tier in now.report.tiers]


def _event(event: str, text: str) -> Metric:
    """Counters ``TIER_event`` of Status."""

    def read(now: Snapshot) -> Samples:
        tiers = [tier.tier.name.lower() for tier in now.report.tiers]
        return [((tier,), now.counters.get(f"{tier}_{event}", 0)) for tier in tiers]

    takes = re.compile(rf"(?:device|host|ssd|tier\d)_{event}")
    return Metric(f"kvstore_tier_{event}_total", "counter", ("tier",), text, read, takes)


def _one(name: str, text: str, counter: str, kind: str = "counter") -> Metric:
    """One counter of Status, which is 0 until it is there."""
    return Metric(
        name, kind, (), text, lambda now: [((), now.counters.get(counter, 0))], re.compile(re.escape(counter))
    )


def _by(name: str, text: str, label: str, pattern: str, kind: str = "counter") -> Metric:
    """Counters of Status whose names match; the pattern's group is the label's value."""
    takes = re.compile(pattern)

    def read(now: Snapshot) -> Samples:
        found = ((takes.fullmatch(key), value) for key, value in now.counters.items())
        return [((match[1],), value) for match, value in found if match is not None]

    return Metric(name, kind, (label,), text, read, takes)


def _failures(now: Snapshot) -> Samples:
    return [
        ((method_label(method), reason.lower()), count)
        for method, times in now.times.items()
        for reason, count in tuple(times.failures.items())
    ]


def _call_times(now: Snapshot) -> Times:
    return [((method_label(method),), times) for method, times in now.times.items()]


def _transfers(name: str, text: str, field: str) -> Metric:
    """A count of each edge."""
    return Metric(
        f"kvstore_transfer_{name}_total", "counter", ("source", "target"), text,
        lambda now: [(edge, getattr(found, field)) for edge, found in now.report.transfers.items()],
    )  # fmt: skip


def _dedup(now: Snapshot) -> Samples:
    shared = now.counters.get("put_known", 0) + now.counters.get("put_existed", 0)
    put = shared + now.counters.get("put_new", 0)
    return [((), shared / put if put else 0.0)]


def method_label(name: str) -> str:
    """``Cache/Match`` of a method's name on the wire."""
    return name.removeprefix("kvstore.v1.")


def _rest(now: Snapshot) -> Samples:
    return [((key,), value) for key, value in now.counters.items() if not any(m.takes.fullmatch(key) for m in _NAMED)]


_NAMED: Final = (
    Metric("kvstore_build", "info", ("version", "boot_id"), "version of the build, and the id of this start"),
    _value("kvstore_uptime_seconds", "since the start", "uptime_seconds"),
    _value("kvstore_draining", "1 while new blocks are refused", "draining"),
    Metric(
        "kvstore_warnings", "gauge", (), "what an operator should know now: `kvctl status` has the sentences",
        lambda now: [((), len(now.report.warnings))],
    ),
    Metric(
        "kvstore_tier_up", "gauge", ("tier",), "1 if the tier is ready, 0 if it is degraded",
        lambda now: [((tier.tier.name.lower(),), float(tier.state == "ready")) for tier in now.report.tiers],
    ),
    _tier("capacity_bytes", "size of the tier", "capacity_bytes"),
    _tier("used_bytes", "of it in use, padding and metadata included", "used_bytes"),
    _tier("reserved_bytes", "of it claimed by reservations", "reserved_bytes"),
    _tier("pinned_bytes", "of it that may not move", "pinned_bytes"),
    _tier("blocks", "blocks with a copy here", "blocks"),
    _tier("saved_bytes", "bytes that codecs save of what lies here", "saved_bytes"),
    _tier("fragmentation_ratio", "share of free memory outside of the largest hole; on SSD share of sealed bytes that "
          "are dead", "fragmentation"),
    _tier("high_watermark_ratio", "share in use above which it is reclaimed", "high_watermark"),
    _event("promoted", "copies made from this tier to a hotter one"),
    _event("demoted", "copies that left for the next colder tier"),
    _event("evicted", "copies dropped for space"),
    _event("removed", "copies dropped because somebody asked"),
    _event("quarantined", "copies dropped because a check failed"),
    _event("dropped", "copies dropped for another reason, such as a write that failed"),
    _one(
        "kvstore_match_found_total",
        "keys that Match found; what a client finds in the index that it maps it tells with its next Match",
        "match_found",
    ),
    _by("kvstore_match_missed_total", "keys that it did not, by the first's reason", "reason", r"match_missed_(\w+)"),
    _by("kvstore_fetch_found_total", "keys of Fetch that were resident, by hottest tier", "tier", r"fetch_found_(\w+)"),
    _by("kvstore_fetch_missed_total", "keys of Fetch answered MISS", "reason", r"fetch_missed_(\w+)"),
    _one("kvstore_fetch_busy_total", "keys of Fetch answered BUSY", "fetch_busy"),
    _by("kvstore_put_blocks_total", "blocks that clients brought: new, or here already when they were committed "
        "(existed) or before (known), which cost no copy", "outcome", r"put_(new|existed|known)"),
    _by("kvstore_put_refused_total", "blocks that were not taken", "reason", r"put_refused_(\w+)"),
    Metric("kvstore_dedup_ratio", "gauge", (), "of the blocks that clients brought, the share that was here already",
           _dedup),
    _value("kvstore_namespaces", "open, or with blocks", "namespaces"),
    _value("kvstore_sessions", "clients that are connected", "sessions"),
    _value("kvstore_leases", "leases that live", "leases"),
    _value("kvstore_reservations", "places claimed and not committed yet", "reservations"),
    _value("kvstore_jobs", "jobs under way, or ended and not asked for yet", "jobs"),
    _one("kvstore_leases_expired_total", "leases whose time ran out", "leases_expired"),
    _one("kvstore_sessions_expired_total", "remote sessions that missed their keepalive", "sessions_expired"),
    _one("kvstore_sessions_ended_total", "sessions that ended, in whatever way", "sessions_ended"),
    _by(
        "kvstore_copies", "now: copies pinned, being filled, doomed, under I/O", "state",
        r"copies_(pinned|filling|doomed|under_io)", "gauge",
    ),
    _one("kvstore_blocks_held", "now: blocks that leases hold", "blocks_held", "gauge"),
    _one("kvstore_buffer_used_bytes", "now: of all sessions' buffers", "buffer_used_bytes", "gauge"),
    _by("kvstore_bookkeeping", "now: entries that are back at 0 at rest (deadlines: at most 64)", "of",
        r"(lease_deadlines|slots_remembered|sessions_with_io)", "gauge"),
    _by("kvstore_queue", "now: loads, blocks for SSD, and operations of the disk that wait for a thread", "queue",
        r"(loads|writes|disk_reads|disk_writes)_queued", "gauge"),
    Metric(
        "kvstore_calls_in_progress", "gauge", ("pool",), "calls that run or wait, by pool of threads",
        lambda now: [((pool,), count) for pool, count in now.calls.items()],
    ),
    Metric("kvstore_transfer_seconds", "histogram", ("source", "target"),
           "time of a batch of copies from one place to another: one call of a tier, one commit, or one block between "
           "two memories", times=lambda now: [(edge, found.batches) for edge, found in now.report.transfers.items()]),
    _transfers("blocks", "blocks that were copied", "blocks"),
    _transfers("bytes", "their bytes as they arrived", "nbytes"),
    _transfers("failures", "blocks whose copy failed", "failed"),
    _one("kvstore_loads_refused_total", "keys answered BUSY since too many promotions waited",
         "loads_refused_queue_full"),
    _by("kvstore_ssd_writes_dropped_total", "blocks not written to SSD", "reason", r"ssd_writes_dropped_(\w+)"),
    _one("kvstore_ssd_written_blocks_total", "blocks that reached SSD", "ssd_blocks_written"),
    _one("kvstore_ssd_written_bytes_total", "their bytes", "ssd_bytes_written"),
    _one("kvstore_ssd_reads_failed_total", "reads of SSD that became misses", "ssd_reads_failed"),
    _one("kvstore_corrupt_blocks_total", "blocks that a verification found bad", "corrupt_blocks"),
    _by("kvstore_disk_reads_total", "block reads of SSD", "outcome", r"disk_read_(ok|corrupt|unavailable|gone)"),
    _by("kvstore_disk_bytes_total", "bytes read and written, overhead included", "way", r"disk_(read|written)_bytes"),
    _by("kvstore_disk_ios_total", "I/O operations", "kind", r"disk_(read|head|write)_ios"),
    _one("kvstore_disk_syncs_total", "syncs", "disk_syncs"),
    _by("kvstore_disk_io_errors_total", "operations that the system failed (read, write), or that did not end in time "
        "(stall)", "kind", r"disk_io_error_(\w+)"),
    _by("kvstore_disk_blocks_total", "blocks of SSD that were written, dropped, or lost with their file", "event",
        r"disk_blocks_(written|dropped|lost)"),
    _one("kvstore_disk_saved_bytes", "now: bytes of SSD that coded slices save", "disk_coded_saved_bytes", "gauge"),
    _one("kvstore_disk_user_bytes_total", "bytes of blocks that were given to SSD", "disk_user_bytes"),
    _one("kvstore_disk_rewritten_bytes_total", "bytes moved together; (user + this) / user is write amplification",
         "disk_rewritten_bytes"),
    _by("kvstore_disk_refused_total", "writes refused for want of room", "reason", r"disk_refused_(\w+)"),
    _one("kvstore_disk_corrupt_total", "checksums that failed", "disk_corrupt"),
    _one("kvstore_disk_degradations_total", "times that SSD degraded: I/O errors and stalls", "disk_degradations"),
    _by("kvstore_wire_bytes_total", "payload of Read and Write streams, before coding", "way",
        r"wire_(read|written)_bytes"),
    _by("kvstore_wire_saved_bytes_total", "of these, bytes that coded chunks saved", "way",
        r"wire_(read|written)_saved_bytes"),
    Metric("kvstore_recovery_blocks", "gauge", (), "blocks found on SSD at the start",
           lambda now: [((), now.report.recovery.blocks)]),
    Metric("kvstore_recovery_seconds", "gauge", (), "how long finding them took",
           lambda now: [((), now.report.recovery.seconds)]),
    Metric("kvstore_recovery_cut_bytes", "gauge", (), "bytes of torn tails that were cut at the start",
           lambda now: [((), now.report.recovery.cut_bytes)]),
    Metric("kvstore_recovery_quarantined", "gauge", (), "what was set aside as damaged at the start",
           lambda now: [((), now.report.recovery.quarantined)]),
    _by("kvstore_loop_turns_over_total", "turns of the event loop that took longer than so many milliseconds", "ms",
        r"loop_turns_over_(\d+)_ms"),
    _one("kvstore_loop_turn_longest_us", "the longest of them, in microseconds", "loop_turn_longest_us", "gauge"),
    _by("kvstore_loop_work_over_total", "turns of the event loop that took more of its own CPU time, in milliseconds",
        "ms", r"loop_work_over_(\d+)_ms"),
    _one("kvstore_loop_work_longest_us", "the most CPU time of one turn, in microseconds", "loop_work_longest_us",
         "gauge"),
    _by("kvstore_locked_sections_over_total", "sections that held the store's lock longer than so many milliseconds",
        "ms", r"locked_sections_over_(\d+)_ms"),
    _one("kvstore_locked_section_longest_us", "the longest of them, in microseconds", "locked_section_longest_us",
         "gauge"),
    _by("kvstore_locked_work_over_total", "sections that took more of their thread's CPU time, in milliseconds", "ms",
        r"locked_work_over_(\d+)_ms"),
    _one("kvstore_locked_work_longest_us", "the most CPU time of one, in microseconds", "locked_work_longest_us",
         "gauge"),
    _by("kvstore_mover_restarts_total", "background threads that failed and were started again", "thread",
        r"mover_restarts_(\w+)"),
    Metric("kvstore_call_seconds", "histogram", ("method",),
           "time from a call's arrival to its reply, of a stream to its end", times=_call_times),
    Metric("kvstore_call_failures_total", "counter", ("method", "reason"), "calls answered with an error", _failures),
)  # fmt: skip

METRICS: Final = (
    *_NAMED,
    Metric("kvstore_events_total", "counter", ("event",), "each other counter of Status, under its name", _rest),
)
