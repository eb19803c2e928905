"""The part of recovery that compares the tables with the segment files: sizes, torn ends, orphans, live bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import Codec
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, Segment, log
from kvstore.tiers.ssd.files import read_pages, remove_file
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.format import (
    HEAD_BYTES_MAX,
    SEGMENT_HEAD_BYTES,
    ExtentShape,
    check_segment_head,
    extent_segment,
    file_number,
    pack_segment_head,
    segment_name,
)
from kvstore.tiers.ssd.port import write_full
from kvstore.tiers.ssd.quarantine import Quarantine
from kvstore.tiers.ssd.replay import drop_extents
from kvstore.tiers.ssd.table import NO_ROW

Rows = NDArray[np.int64]

NO_END = 1 << 60


class Survey:
    """Goes over the segment files once."""

    def __init__(self, core: Core, findings: Findings, quarantine: Quarantine) -> None:
        self._core = core
        self._findings = findings
        self._quarantine = quarantine
        self._saves: Rows = np.zeros(0, dtype=np.int64)
        """Bytes that a block of each extent row saves by its coding."""

    def run(self, names: list[str]) -> None:
        """Open what the tables name, remove what they do not, and count live bytes."""
        core = self._core
        present = {number for name in names if (number := file_number(name, "segment")) is not None}
        ends, shares, live = self._measure()
        wanted = (
            set(np.unique(np.frombuffer(core.table.extent_segment, dtype=np.uint32)).tolist()) if ends.size else set()
        )
        wanted.discard(NO_ROW)
        for number in sorted(wanted - present):
            lost = core.table.extents_of_segment(number)
            drop_extents(core, lost, self._findings, f"blocks of {segment_name(number)}, which is missing")
        segment_of = np.array(core.table.extent_segment, dtype=np.uint32)
        for number in sorted(wanted & present):
            rows = np.flatnonzero(segment_of == number)
            self._open(number, rows, ends, shares, live)
        for number in sorted(present - wanted):
            self._remove_orphan(number)
        self._reopen_last()
        core.next_segment = max([core.next_segment, *(number + 1 for number in present)])

    def _measure(self) -> tuple[Rows, Rows, Rows]:
        """End in the segment, bytes a block, and live blocks of each extent row."""
        table = self._core.table
        if not len(table.extent_number):
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty
        spaces = np.array(table.extent_space, dtype=np.int64)
        codecs = np.array(table.extent_codec, dtype=np.int64)
        blocks = np.array(table.extent_blocks, dtype=np.int64)
        kinds, inverse = np.unique(spaces << 32 | codecs << 24 | blocks, return_inverse=True)
        totals = np.array([self._total(int(kind)) for kind in kinds], dtype=np.int64)[inverse]
        pages = np.array(table.extent_pages, dtype=np.int64)
        heads = np.array([self._head(int(kind)) for kind in kinds], dtype=np.int64)[inverse]
        plain, totals = totals, np.where(pages > 0, pages * PAGE_BYTES, totals)
        # No writer makes such extents: their end is behind that of any file, and they are dropped for it.
        totals[(heads > HEAD_BYTES_MAX) | (totals < np.where(pages > 0, heads, 0))] = NO_END
        offsets = np.array(table.extent_page, dtype=np.int64) * PAGE_BYTES
        shares = totals // np.maximum(blocks, 1)
        self._saves = plain // np.maximum(blocks, 1) - shares
        return offsets + totals, shares, np.array(table.extent_live, dtype=np.int64)

    def _total(self, kind: int) -> int:
        space, codec, blocks = kind >> 32, kind >> 24 & 0xFF, kind & 0xFFFFFF
        if not 0 <= space < len(self._core.spaces):
            return 0
        return ExtentShape.of(self._core.spaces[space].layout, Codec(codec), blocks).total_bytes

    def _head(self, kind: int) -> int:
        """Bytes of the head under coding 1, which is at least as long as the plain one."""
        space, codec, blocks = kind >> 32, kind >> 24 & 0xFF, kind & 0xFFFFFF
        if not 0 <= space < len(self._core.spaces):
            return 0
        return ExtentShape.of(self._core.spaces[space].layout, Codec(codec), blocks, 1).head_bytes

    def _open(self, number: int, rows: Rows, ends: Rows, shares: Rows, live: Rows) -> None:
        core, name = self._core, segment_name(number)
        fd = core.port.open(name, direct=True)
        size = core.port.fstat(fd).size
        try:
            check_segment_head(memoryview(read_pages(core, fd, 0, SEGMENT_HEAD_BYTES)), number)
        except CorruptBlock as error:
            # Extents check themselves, so a damaged head costs nothing but this note; it is written anew.
            self._findings.damaged(error.message)
            self._mend_head(number)
        beyond = rows[ends[rows] > size]
        if len(beyond):
            drop_extents(core, [int(row) for row in beyond], self._findings, f"blocks behind the end of {name}")
            rows = rows[ends[rows] <= size]
        used = int(ends[rows].max()) if len(rows) else SEGMENT_HEAD_BYTES
        if size > used:
            self._cut(name, fd, used, size)
        segment = Segment(number, fd, used, used)
        segment.live_bytes = int((shares[rows] * live[rows]).sum())
        segment.blocks = int(live[rows].sum())
        core.saved_bytes += int((self._saves[rows] * live[rows]).sum())
        core.segments[number] = segment
        core.ledger.set_segment(number, core.port.fstat(fd).allocated)

    def _mend_head(self, number: int) -> None:
        port = self._core.port
        fd = port.open(segment_name(number))
        try:
            write_full(port, fd, memoryview(pack_segment_head(number)), 0)
            port.fdatasync(fd)
        finally:
            port.close(fd)

    def _reopen_last(self) -> None:
        """Go on in the last segment, if it has room: many restarts do not leave many small segments."""
        core = self._core
        last = max(core.segments.values(), key=lambda one: one.number, default=None)
        if last is not None and last.used_bytes <= core.config.segment_size // 2:
            last.open = True
            core.open_segment = last

    def _cut(self, name: str, fd: int, used: int, size: int) -> None:
        """Cut the end that no record names; the beginning of what was being written there is kept aside."""
        core = self._core
        head = read_pages(core, fd, used, PAGE_BYTES)
        # What a reused file held before names another segment.
        if extent_segment(head) == int(name.rpartition("-")[2]):
            self._findings.cut_bytes += size - used
            room = min(size - used, core.config.io_bytes, self._quarantine.room_bytes)
            kept = read_pages(core, fd, used, room) if room else b""
            self._quarantine.keep(f"cut-{name}", kept, "the end of a segment, named by no record")
        core.port.truncate(fd, used)
        core.port.fdatasync(fd)

    def _remove_orphan(self, number: int) -> None:
        core, name = self._core, segment_name(number)
        log.warning("recovery: %s holds no block that a record names; removed", name)
        fd = core.port.open(name, direct=True)
        try:
            if extent_segment(read_pages(core, fd, SEGMENT_HEAD_BYTES, PAGE_BYTES)) == number:
                self._findings.cut_bytes += core.port.fstat(fd).size
        finally:
            core.port.close(fd)
        remove_file(core, name)
        self._findings.orphans_removed += 1
