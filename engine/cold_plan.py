"""Cold slices by a reading plan: read and checked by the daemon's native threads, several pieces ahead of attention."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from kvstore.client.plan import Plan, PlanEnded
from kvstore.core.errors import (
    DeadlineExceeded,
    InternalError,
    KVStoreError,
    ResourceExhausted,
    Unavailable,
    UnknownPlan,
)
from kvstore.core.namespace import PAGE_BYTES, BlockLayout
from kvstore.core.types import Area, BlockKey, Reason
from kvstore.engine.cold import BUFFER_SHARE, ColdLost, Indices, Pass, Piece
from kvstore.engine.cold_fetch import FetchReader
from kvstore.engine.link import LOG, CacheLink, LinkLost

RING_PIECES: Final = 4
PIECE_BYTES_MAX: Final = 8 << 20
"""Four pieces of this size keep a disk busy and stay small beside the context that they are of."""


class PlanReader:
    """Reads by a reading plan: the daemon's native threads read ahead into a ring in the session's buffer.

    Rows that are not in storage alone, and all of them while there is no room for a ring, are fetched.
    """

    def __init__(self, link: CacheLink, layout: BlockLayout, fetch: FetchReader) -> None:
        self._link = link
        self._layout = layout
        self._fetch = fetch
        self._plan: Plan | None = None
        self._planned = np.zeros(0, np.bool_)
        """Which rows the plan reads; rows past its end are not asked for yet."""
        self._queued: deque[Pass] = deque()

    @property
    def starts(self) -> Indices:
        """See ``ColdReader``."""
        return self._fetch.starts

    def take_in(self) -> None:
        """See ``ColdReader``."""
        self._fetch.take_in()
        if self._queued:
            # A step ended early, with passes that nobody will read.
            self._drop()

    def begin(self, passes: Sequence[Pass]) -> None:
        """See ``ColdReader``."""
        self._extend()
        if self._plan is None:
            self._fetch.begin(passes)
            return
        for layer, rows in passes:
            self._queue(self._plan, layer, rows)

    def read(self, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        """See ``ColdReader``."""
        plan = self._plan
        if plan is None:
            yield from self._fetch.read(layer, chosen)
            return
        if not self._queued:
            self._queue(plan, layer, chosen)
        asked, rows = self._queued.popleft()
        if asked != layer:
            raise InternalError(f"layer {layer} is read where {asked} was announced")
        wanted = np.arange(len(self._planned), dtype=np.int32) if rows is None else rows
        there = self._planned[wanted]
        if there.any():
            yield from self._pieces(plan, wanted if rows is None else wanted[there])
        if not there.all():
            yield from self._fetch.read(layer, wanted[~there])

    def close(self) -> None:
        """See ``ColdReader``."""
        self._drop()
        self._fetch.close()

    def _queue(self, plan: Plan, layer: int, rows: Indices | None) -> None:
        planned = None if rows is None else rows[self._planned[rows]]
        if self._planned.any() if planned is None else len(planned):
            self._link.call(lambda _: plan.queue(layer, planned))
        self._queued.append((layer, rows))

    def _pieces(self, plan: Plan, rows: Indices) -> Iterator[Piece]:
        """The pieces of the next pass, over these rows."""
        tally, now, pieces = self._fetch.tally, self._link.now, plan.pieces()
        try:
            while True:
                begun = now()
                piece = next(pieces, None)
                tally.waited_s += now() - begun
                if piece is None:
                    return
                tally.nbytes += piece.data.nbytes
                part = rows[piece.first : piece.first + piece.count]
                addresses = piece.data.ctypes.data + np.arange(piece.count, dtype=np.int64) * piece.slice_bytes
                tables = torch.from_numpy(addresses)[None], torch.from_numpy(self.starts[part])[None]
                yield Piece(part, *tables, piece.codec.word, piece.data.nbytes)
        except (PlanEnded, DeadlineExceeded) as error:
            self._drop()
            lost = error.key if isinstance(error, PlanEnded) else None
            why = error.why if isinstance(error, PlanEnded) else Reason.DEADLINE
            raise ColdLost(lost or self._fetch.keys[int(rows[0])], why) from error

    def _extend(self) -> None:
        """Let the plan know of the rows that it does not know; without room for a ring there is none."""
        keys = self._fetch.keys
        if self._plan is not None and len(self._planned) < len(keys):
            plan = self._plan
            try:
                plan.extend(keys[len(self._planned) :])
            except UnknownPlan as error:
                LOG.info("a reading plan has ended (%s): it is opened anew", error)
                self._drop()
            except KVStoreError as error:
                self._link.lose(error)
                raise LinkLost(str(error)) from error
        if self._plan is None and keys:
            self._plan = self._open(keys)
        if self._plan is not None and len(self._planned) < len(keys):
            self._planned = self._plan.keys_mask

    def _open(self, keys: list[BlockKey]) -> Plan | None:
        share = self._link.region(Area.BUFFER).nbytes // BUFFER_SHARE
        piece = min(PIECE_BYTES_MAX, (share // RING_PIECES - PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES)
        if piece < max(self._layout.raw_slice_stride, self._layout.slice_stride):
            return None
        cache, namespace, idle_ms = self._link.cache, self._link.namespace, self._link.lease_ttl_ms
        try:
            return Plan.open(
                cache, namespace, keys, piece_bytes=piece, pieces=RING_PIECES, idle_ms=idle_ms, start=False
            )
        except (ResourceExhausted, Unavailable) as error:
            LOG.info("no reading plan for now, slices are fetched: %s", error)
            return None
        except KVStoreError as error:
            self._link.lose(error)
            raise LinkLost(str(error)) from error

    def _drop(self) -> None:
        plan, self._plan = self._plan, None
        self._planned = np.zeros(0, np.bool_)
        self._queued.clear()
        if plan is not None:
            try:
                plan.close()
            except KVStoreError as error:
                LOG.info("a reading plan could not be closed: %s", error)
