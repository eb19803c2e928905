"""Where the cache has no DEVICE: full blocks go from the engine's own pool into the session's buffer, to be committed.

The pool's blocks are raw slices, which is what a place in the buffer takes whatever the namespace's codec: the copy out
of the buffer encodes. The engine then reads them in HOST, in place.
"""

from __future__ import annotations

from kvstore.core.namespace import BlockLayout
from kvstore.core.types import BATCH_KEYS_MAX, Area, Outcome, ReservationId, Tier
from kvstore.engine.blocks import Block
from kvstore.engine.link import CacheLink


class Staging:
    """Copies pooled blocks into the buffer. Owned by one block manager and used from its thread."""

    def __init__(self, link: CacheLink, layout: BlockLayout) -> None:
        self._link = link
        self._layout = layout

    def stage(self, blocks: list[Block]) -> list[ReservationId]:
        """Claim a place for each block and copy it there; fewer, from the first on, where the buffer is full.

        The reservations are the caller's, to commit. Raises LinkLost.
        """
        count = min(len(blocks), BATCH_KEYS_MAX)
        result = self._link.call(lambda cache: cache.reserve(self._link.namespace, Tier.HOST, count=count))
        staged: list[ReservationId] = []
        size, stride = self._layout.raw_slice_bytes, self._layout.raw_slice_stride
        for block, outcome, place in zip(blocks, result.outcomes, result.places, strict=False):
            if outcome is not Outcome.PENDING or place is None:
                break
            target = self._link.region(Area.BUFFER).slices(place.offset, size, place.stride)
            target.copy_(block.region.slices(block.offset, size, stride))
            staged.append(result.reservation_ids[len(staged)])
        return staged
