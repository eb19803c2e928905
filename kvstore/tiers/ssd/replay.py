"""Fills the tables from a checkpoint and the records that follow it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.tiers.ssd.checkpoint import Checkpoint
from kvstore.tiers.ssd.core import Core
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.format import split_keys
from kvstore.tiers.ssd.journal import DropRecord, ExtentRecord, Record
from kvstore.tiers.ssd.salvage import Adopted, later_copies
from kvstore.tiers.ssd.table import NO_ROW, NO_SPACE, Extent


class Replay:
    """Knows extents by number while recovery lasts; the tables themselves do not need to."""

    def __init__(self, core: Core, findings: Findings) -> None:
        self._core = core
        self._findings = findings
        self._rows: dict[int, int] = {}
        self._first = array("I")
        """By row, of an extent that a record named: the handle of its first block. The others follow."""
        self._numbers: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._order: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._checkpoint: Checkpoint | None = None
        self._by_extent: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None
        self._moved: dict[tuple[int, int], tuple[int, int]] = {}
        self.unknown_dead: set[tuple[int, int]] = set()

    def load(self, found: Checkpoint) -> None:
        """Take the checkpoint's rows over."""
        core = self._core
        space_of = np.array(
            [core.space_index.get(one, NO_SPACE) for one in found.namespaces] + [NO_SPACE], dtype=np.uint32
        )
        spaces = found.extents["space"].astype(np.uint32)
        columns = dict(found.extents)
        columns["space"] = space_of[np.minimum(spaces, len(space_of) - 1)]
        core.table.load_blocks(found.block_extent, found.block_position, found.block_keys)
        core.table.load_extents(columns, found.parents)
        core.next_extent, core.next_segment = found.next_extent, found.next_segment
        self._checkpoint = found
        self._numbers = found.extents["number"].astype(np.uint64)
        self._order = np.argsort(self._numbers)

    def apply(self, record: Record) -> None:
        """Take one record over."""
        if isinstance(record, ExtentRecord):
            self._add(record)
        elif isinstance(record, DropRecord):
            for place in record.dead:
                self._drop(*self._moved.pop(place, place))
        else:
            for old, position, new, to in record.moved:
                self._move((old, position), (new, to))

    def finish(self) -> None:
        """Drop what no namespace explains."""
        core = self._core
        spaces = np.array(core.table.extent_space, dtype=np.uint32)
        strangers = [int(row) for row in np.flatnonzero(spaces == NO_SPACE)]
        drop_extents(core, strangers, self._findings, "blocks of a namespace that the catalog does not hold")

    def _add(self, record: ExtentRecord) -> None:
        core = self._core
        core.next_extent = max(core.next_extent, record.number + 1, record.age + 1)
        core.next_segment = max(core.next_segment, record.segment + 1)
        space = core.space_index.get(record.namespace_id, NO_SPACE)
        if self._row_of(record.number) is not None:
            return
        row = core.table.add_extent(
            Extent(
                record.number, record.segment, record.offset, record.age, record.blocks, record.codec, space,
                record.parent, record.pages,
            ),
            committed=True,
        )  # fmt: skip
        self._rows[record.number] = row
        if row >= len(self._first):
            self._first.extend([NO_ROW] * (row + 1 - len(self._first)))
        self._first[row] = core.table.append_blocks(row, split_keys(record.keys))

    def adopt(self, found: list[Adopted]) -> int:
        """Take over what salvage found and no record names; returns the blocks."""
        latest = later_copies(found)
        count = 0
        for one in found:
            record = one.record
            if self._row_of(record.number) is not None:
                continue
            self._add(record)
            names = [(record.namespace_id, record.key(position)) for position in range(record.blocks)]
            for position, name in enumerate(names):
                dead = (record.number, position) in self.unknown_dead or latest.get(name) != record.number
                if position not in one.whole or dead:
                    self._drop(record.number, position)
                else:
                    count += 1
        return count

    def _move(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """A block that died before it moved is dead; one that is dropped later under its old name has moved."""
        if self._drop(*old):
            self._moved[old] = new
        else:
            self._drop(*new)

    def _drop(self, number: int, position: int) -> bool:
        """Drop a block; False if it was not there."""
        table = self._core.table
        row = self._row_of(number)
        if row is None:
            self.unknown_dead.add((number, position))
            return False
        for handle in self._handles_of(row):
            if table.block_extent[handle] == row and table.block_position[handle] == position:
                table.drop_block(handle)
                if table.extent_live[row] == 0:
                    table.free_extent(row)
                return True
        return False

    def _row_of(self, number: int) -> int | None:
        table = self._core.table
        row = self._rows.get(number)
        if row is None and len(self._order):
            at = int(np.searchsorted(self._numbers, np.uint64(number), sorter=self._order))
            if at < len(self._order) and int(self._numbers[self._order[at]]) == number:
                row = int(self._order[at])
        # The row may have been freed, and used again for another extent.
        return row if row is not None and table.extent_number[row] == number else None

    def _handles_of(self, row: int) -> Sequence[int]:
        if row < len(self._first) and self._first[row] != NO_ROW:
            first = self._first[row]
            return range(first, first + self._core.table.extent_blocks[row])
        if self._checkpoint is None:
            return ()
        if self._by_extent is None:
            order = np.argsort(self._checkpoint.block_extent, kind="stable")
            sorted_rows = self._checkpoint.block_extent[order]
            starts = np.searchsorted(sorted_rows, np.arange(len(self._numbers) + 1))
            self._by_extent = (order, starts)
        order, starts = self._by_extent
        handles: list[int] = order[starts[row] : starts[row + 1]].tolist()
        return handles


def drop_extents(core: Core, rows: list[int], findings: Findings, why: str) -> None:
    """Drop every live block of some extents; what lived counts as quarantined."""
    if not rows:
        return
    lost = 0
    for row, pairs in core.table.blocks_of_extents(rows).items():
        for _, handle in pairs:
            core.table.drop_block(handle)
        lost += len(pairs)
        if core.table.extent_segment[row] != NO_ROW:
            core.table.free_extent(row)
    if lost:
        findings.quarantined += lost
        findings.damaged(f"{lost} {why}")
