"""What recovery found, as rows for the store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import BlockKey, Codec
from kvstore.tiers.base import RecoveredBlock
from kvstore.tiers.ssd.core import Core
from kvstore.tiers.ssd.files import read_pages
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.format import split_keys, unpack_extent_head
from kvstore.tiers.ssd.table import NO_ROW

CHUNK_BLOCKS: Final = 1 << 12
"""Small, since the numbers of a chunk are objects, and the memory of many stays with the process."""


def missing_parents(core: Core, findings: Findings) -> dict[int, BlockKey]:
    """Parents, by handle, of blocks whose neighbour in the extent is dead: only the extent's head still names them.

    A block whose head does not read well is dropped.
    """
    handles, rows, positions = _in_order(core)
    follows = np.zeros(len(handles), dtype=bool)
    follows[1:] = (rows[1:] == rows[:-1]) & (positions[1:] == positions[:-1] + 1)
    lonely = np.flatnonzero((positions > 0) & ~follows)
    parents: dict[int, BlockKey] = {}
    for at in lonely.tolist():
        handle, extent = int(handles[at]), core.table.extent(int(rows[at]))
        try:
            data = read_pages(core, core.segments[extent.segment].fd, extent.offset, core.shape(extent).head_bytes)
            head = unpack_extent_head(memoryview(data))
            if (head.number, head.shape.blocks) != (extent.number, extent.blocks):
                raise CorruptBlock(
                    f"the extent is number {head.number} of {head.shape.blocks} blocks; expected {extent.number} of"
                    f" {extent.blocks}",
                    field="number",
                )
        except CorruptBlock as error:
            findings.damaged(f"block {core.table.key(handle).hex()}: {error.message}")
            findings.quarantined += 1
            core.drop_row(handle)
            continue
        parents[handle] = split_keys(head.keys)[int(positions[at]) - 1]
    return parents


def _in_order(core: Core) -> tuple[NDArray[np.intp], NDArray[np.uint32], NDArray[np.uint16]]:
    """Handles, extent rows and positions of the live blocks, oldest first."""
    table = core.table
    rows = np.array(table.block_extent, dtype=np.uint32)
    positions = np.array(table.block_position, dtype=np.uint16)
    handles = np.flatnonzero(rows != NO_ROW)
    if not len(handles):
        return handles, rows[:0], positions[:0]
    ages = np.array(table.extent_age, dtype=np.uint64)
    rows, positions = rows[handles], positions[handles]
    order = np.lexsort((positions, rows, ages[rows]))
    return handles[order], rows[order], positions[order]


def recovered_blocks(core: Core, parents: dict[int, BlockKey]) -> Iterator[RecoveredBlock]:
    """Every live block, oldest first; ``parents`` as ``missing_parents`` found them. The table must not change.

    This loop is most of a warm start, so it works on columns, a chunk at a time.
    """
    table = core.table
    handles, rows, positions = _in_order(core)
    spaces = [space.namespace_id for space in core.spaces]
    space_of, codec_of = np.array(table.extent_space), np.array(table.extent_codec)
    age_of = np.array(table.extent_age, dtype=np.uint64)
    codecs = {int(codec): codec for codec in Codec}
    keys, first_parents = table.block_key, table.extent_parent
    previous = BlockKey(b"")
    for begin in range(0, len(handles), CHUNK_BLOCKS):
        row, place = rows[begin : begin + CHUNK_BLOCKS], positions[begin : begin + CHUNK_BLOCKS]
        ages = (age_of[row] << np.uint64(16)) | place.astype(np.uint64)
        some = handles[begin : begin + CHUNK_BLOCKS]
        named, found = some.tolist(), keys.some(some)
        # A block's parent is the one before it in its extent, but for the first, and where that one is dead.
        above = [previous, *found[:-1]]
        previous = found[-1]
        for at in np.flatnonzero(place == 0).tolist():
            above[at] = first_parents[int(row[at])]
        for at in [at for at, handle in enumerate(named) if handle in parents] if parents else ():
            above[at] = parents[named[at]]
        owners = [spaces[space] for space in space_of[row].tolist()]
        coded = [codecs[codec] for codec in codec_of[row].tolist()]
        yield from map(_as_block, zip(named, owners, found, above, coded, ages.tolist(), strict=True))


_as_block: Final = partial(tuple.__new__, RecoveredBlock)
"""``RecoveredBlock._make`` without its call: a start makes one for each block."""
