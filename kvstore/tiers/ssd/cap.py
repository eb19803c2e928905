"""A start under a cap that is smaller than what the directory holds: whole segments go until the cap holds.

The segments that are worth least go first: worth is the share of a segment that lives, times the rank of its blocks by
recency. Their blocks are forgotten first, a checkpoint says so, and only then are the files unlinked, so that a crash
in between leaves files that nobody names, and no names without files.
"""

from __future__ import annotations

import numpy as np

from kvstore.tiers.ssd.core import Core, Segment, log
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.table import NO_ROW


def forget_over_cap(core: Core, findings: Findings) -> None:
    """Forget the blocks of as many segments as exceed the cap, and one that rewriting needs. ``findings`` gets the
    segments, which are in no table any more, to be unlinked once a checkpoint is durable."""
    with core.lock:
        if core.room_bytes() >= 0:
            return
        findings.shrunk = True
        worth = _worth(core)
        blocks, left = core.table.blocks, core.ledger.segments_bytes
        for segment in sorted(core.segments.values(), key=lambda one: worth.get(one.number, 0.0)):
            # Older journals and checkpoints go with the checkpoint that follows, so only the need of it counts.
            if core.config.capacity_bytes - core.metadata_need() - left >= core.config.segment_size:
                break
            _forget(core, segment)
            left -= core.ledger.segment_bytes.get(segment.number, 0)
            findings.over_cap.append(segment)
        blocks -= core.table.blocks
        core.counters["blocks_over_cap"] += blocks
    log.warning(
        "recovery: %d blocks in %d segments are dropped, since the cap is %d bytes now",
        blocks, len(findings.over_cap), core.config.capacity_bytes,
    )  # fmt: skip


def _worth(core: Core) -> dict[int, float]:
    """Share of live bytes times rank by the mean age of live blocks, by segment number."""
    table = core.table
    segment_of = np.array(table.extent_segment, dtype=np.uint32)
    rows = np.flatnonzero(segment_of != NO_ROW)
    numbers, place = np.unique(segment_of[rows], return_inverse=True)
    live = np.array(table.extent_live, dtype=np.float64)[rows]
    ages = np.array(table.extent_age, dtype=np.float64)[rows]
    count = np.maximum(np.bincount(place, live), 1)
    rank = np.argsort(np.argsort(np.bincount(place, live * ages) / count)) + 1
    return {
        int(number): (1 - core.segments[int(number)].dead_share) * float(order)
        for number, order in zip(numbers, rank, strict=True)
        if int(number) in core.segments
    }


def _forget(core: Core, segment: Segment) -> None:
    rows = core.table.extents_of_segment(segment.number)
    for pairs in core.table.blocks_of_extents(rows).values():
        for _, handle in pairs:
            core.drop_row(handle)
    if core.open_segment is segment:
        core.open_segment = None
    segment.open = False
    del core.segments[segment.number]
