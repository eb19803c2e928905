"""What recovery found, as rows for the store."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core.types import KEY_BYTES, BlockKey, Codec
from kvstore.tiers.base import DiskHandle, RecoveredBlock
from kvstore.tiers.ssd.core import Core
from kvstore.tiers.ssd.table import NO_ROW


def recovered_blocks(core: Core) -> Iterator[RecoveredBlock]:
    """Every live block, oldest first. The table must not change meanwhile."""
    table = core.table
    extents = np.array(table.block_extent, dtype=np.uint32)
    positions = np.array(table.block_position, dtype=np.uint16)
    handles = np.flatnonzero(extents != NO_ROW)
    ages = np.array(table.extent_age, dtype=np.uint64)
    if not len(handles):
        return
    order = np.lexsort((positions[handles], extents[handles], ages[extents[handles]]))
    spaces = [space.namespace_id for space in core.spaces]
    previous: tuple[int, int, BlockKey] = (-1, -1, BlockKey(b""))
    for handle in (int(one) for one in handles[order]):
        row, position = table.block_extent[handle], table.block_position[handle]
        key = table.key(handle)
        if position == 0:
            parent = BlockKey(bytes(table.extent_parent[row * KEY_BYTES : (row + 1) * KEY_BYTES]))
        elif previous[:2] == (row, position - 1):
            parent = previous[2]
        else:
            parent = BlockKey(b"")
        previous = (row, position, key)
        yield RecoveredBlock(
            DiskHandle(handle), spaces[table.extent_space[row]], key, parent, Codec(table.extent_codec[row]),
            table.extent_age[row] << 16 | position,
        )  # fmt: skip
