"""Where slices lie, told to those who read them natively and many times: reading plans.

Nothing of segments leaves this room but a descriptor of its own and a number that tells when a file was given to other
blocks. Heads are read as for any read, so that only blocks whose tables agree are located.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvstore.core.types import BlockName
from kvstore.tiers.base import BlockRead, DiskHandle, HeldFile, Located, ReadStatus
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.reader import Reader, Wanted

SECTION: Final = 256
"""Blocks looked up in one section under the lock."""

_NOTHING: Final = memoryview(b"")


class Locator:
    """Locates units of blocks."""

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self._reader = reader

    def locate(
        self, blocks: Sequence[tuple[DiskHandle, BlockName]], units: tuple[int, int]
    ) -> tuple[Located, list[tuple[BlockRead, str]]]:
        """See ``DiskTier.locate``; corrupt blocks are told with their causes, not yet quarantined."""
        core, count, width = self._core, len(blocks), units[1] - units[0]
        located = Located(
            [ReadStatus.OK] * count, [], np.full(count, -1, np.int32), np.zeros((count, width), np.uint64),
            np.zeros((count, width), np.uint32), np.zeros((count, width), np.uint32), np.zeros(count, np.uint8),
        )  # fmt: skip
        causes: list[tuple[BlockRead, str]] = []
        if not core.health.reads_ok or core.closed:
            located.status[:] = [ReadStatus.UNAVAILABLE] * count
            return located, causes
        try:
            for begin in range(0, count, SECTION):
                self._section(blocks[begin : begin + SECTION], units, (located, begin), causes)
        except BaseException:
            for file in located.files:
                file.release()
            raise
        return located, causes

    def _section(
        self,
        blocks: Sequence[tuple[DiskHandle, BlockName]],
        units: tuple[int, int],
        into: tuple[Located, int],
        causes: list[tuple[BlockRead, str]],
    ) -> None:
        core, (located, begin) = self._core, into
        reads = [BlockRead(handle, key, _NOTHING, units, space) for handle, (space, key) in blocks]
        status = [ReadStatus.OK] * len(reads)
        found: dict[int, str] = {}
        first = len(located.files)
        with core.lock:
            # One section, so that what is held is what the table says.
            wanted = self._reader.look_up(reads, status)
            try:
                for want in wanted:
                    held = core.hold(want.segment)
                    release = partial(core.let_go, want.segment, held)
                    located.files.append(HeldFile(held.fd, held.version, 0, release))
            except OSError as error:
                # No descriptor is left: these blocks can not be read so now.
                rest = wanted[len(located.files) - first :]
                log.warning("%s can not be held open: %s", rest[0].segment.name, error)
                for index in [index for want in rest for _, index in want.blocks]:
                    status[index] = ReadStatus.UNAVAILABLE
        try:
            self._reader.learn(reads, wanted, status, found)
        finally:
            for want in wanted:
                core.leave(want.segment)
        for number, want in enumerate(wanted, first):
            _fill(located, (begin, number), want, units, status)
        located.status[begin : begin + len(reads)] = status
        causes += [(reads[index], cause) for index, cause in found.items()]


def _fill(
    located: Located, at: tuple[int, int], want: Wanted, units: tuple[int, int], status: Sequence[ReadStatus]
) -> None:
    """Columns of one extent's blocks; ``at`` is the row of the section's first block, and the number of the file."""
    shape, tables = want.shape, want.tables
    good = [(position, index) for position, index in want.blocks if status[index] is ReadStatus.OK]
    if tables is None or not good:
        return
    position = np.array([one for one, _ in good], np.int64)
    row = np.array([at[0] + index for _, index in good], np.int64)
    first, end = units
    located.file[row] = at[1]
    located.crcs[row] = tables.crcs[position, first:end]
    base = want.extent.offset + shape.head_bytes
    if tables.coded is None:
        unit = np.arange(first, end, dtype=np.int64)
        located.offsets[row] = base + (unit[None, :] * shape.blocks + position[:, None]) * shape.slice_stride
        located.lengths[row] = shape.slice_bytes
        return
    located.offsets[row] = tables.coded.offsets(base)[first:end, position].T
    located.lengths[row] = tables.coded.lengths[first:end, position].T
    located.planes[row] = tables.coded.planes
