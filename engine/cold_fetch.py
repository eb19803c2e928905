"""Cold slices by ``fetch`` into the session's buffer: one job of the cache a piece, a few of them under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import FetchResult
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, JobId, LeaseId, Outcome, Target
from kvstore.engine.blocks import BlockTable, Column
from kvstore.engine.cold import BUFFER_SHARE, ColdLost, Indices, Pass, Piece, Tally
from kvstore.engine.cooling import key_of
from kvstore.engine.link import CacheLink

AHEAD: Final = 2
"""Pieces that are read while one is attended to."""
WAIT_MS: Final = 60_000
"""Longest wait for one piece."""


@dataclass(slots=True)
class _Flight:
    """One job: slices of ``layer`` of the blocks at ``rows``."""

    layer: int
    rows: Indices
    lease: LeaseId
    job: JobId
    result: FetchResult


class FetchReader:
    """Reads through ``fetch`` into the session's buffer."""

    def __init__(
        self, link: CacheLink, layout: BlockLayout, table: BlockTable, block_tokens: int, tally: Tally
    ) -> None:
        self._link = link
        self.tally = tally
        self._layout = layout
        self._table = table
        self._tokens = block_tokens
        self.keys: list[BlockKey] = []
        """By row."""
        self._starts = Column(np.int32)
        share = link.region(Area.BUFFER).nbytes // BUFFER_SHARE // (AHEAD + 1)
        widest = max(layout.raw_slice_stride, layout.slice_stride)
        self._piece_blocks = min(BATCH_KEYS_MAX, max(1, share // widest))
        self._wanted: deque[tuple[int, Indices]] = deque()
        self._flights: deque[_Flight] = deque()
        self._leases: list[LeaseId] = []

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """See ``ColdReader``."""
        return self._starts.view()

    def take_in(self) -> None:
        """See ``ColdReader``."""
        self._land_all()
        for index in self._table.cold.view(len(self.keys)).tolist():
            self.keys.append(key_of(self._table.blocks[index]))
            self._starts.append(index * self._tokens)

    def begin(self, passes: Sequence[Pass]) -> None:
        """See ``ColdReader``."""
        every = np.arange(len(self.keys), dtype=np.int32)
        self._wanted = deque(
            (layer, part) for layer, rows in passes for part in self._parts(every if rows is None else rows)
        )
        self._ask_ahead()

    def read(self, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        """See ``ColdReader``."""
        if chosen is not None and not self._flights:
            for rows in self._parts(chosen):
                yield from self._pieces(self._ask(layer, rows))
            return
        while self._flights and self._flights[0].layer == layer:
            yield from self._pieces(self._flights.popleft())

    def close(self) -> None:
        """See ``ColdReader``. The leases end; while the link is down they are gone already."""
        self._wanted.clear()
        for lease in [*self._leases, *(flight.lease for flight in self._flights)]:
            self._link.end(lease)
        self._flights.clear()
        self._leases.clear()

    def _parts(self, rows: Indices) -> list[Indices]:
        return [rows[begin : begin + self._piece_blocks] for begin in range(0, len(rows), self._piece_blocks)]

    def _ask_ahead(self) -> None:
        while self._wanted and len(self._flights) < AHEAD:
            self._flights.append(self._ask(*self._wanted.popleft()))

    def _ask(self, layer: int, rows: Indices) -> _Flight:
        keys = [self.keys[row] for row in rows.tolist()]
        lease = self._leases.pop() if self._leases else self._link.grant("cold")
        result = self._link.call(
            lambda cache: cache.fetch(
                self._link.namespace, keys, Target.BUFFER, lease_id=lease, layers=(layer, layer + 1)
            )
        )
        return _Flight(layer, rows, lease, result.job_id, result)

    def _pieces(self, flight: _Flight) -> Iterator[Piece]:
        """Wait for a job and hand out what came, one piece a codec; the buffer is given back after the last."""
        result = self._landed(flight)
        self._ask_ahead()
        region = self._link.region(Area.BUFFER)
        places = [place for place in result.places if place is not None]
        codecs = np.array([place.codec for place in places], np.int8)
        addresses = np.array([place.offset for place in places], np.int64) + region.address
        starts = self._starts.view()[flight.rows]
        for number in np.unique(codecs).tolist():
            codec = self._layout.layer_codec(places[int(np.argmax(codecs == number))].codec, flight.layer)
            chosen = codecs == number
            nbytes = int(chosen.sum()) * self._layout.of_codec(codec)[0]
            self.tally.nbytes += nbytes
            tables = torch.from_numpy(addresses[chosen])[None], torch.from_numpy(starts[chosen])[None]
            yield Piece(flight.rows[chosen], *tables, codec.word, nbytes)
        self._give_back(flight)

    def _landed(self, flight: _Flight) -> FetchResult:
        result = flight.result
        if Outcome.PENDING in result.outcomes:
            begun = self._link.now()
            result = self._link.call(lambda cache: cache.wait_job(flight.job, WAIT_MS))
            self.tally.waited_s += self._link.now() - begun
        for row, outcome, reason in zip(flight.rows, result.outcomes, result.reasons, strict=True):
            if outcome is not Outcome.HIT:
                self._give_back(flight)
                raise ColdLost(self.keys[int(row)], reason)
        return result

    def _give_back(self, flight: _Flight) -> None:
        self._link.release(flight.lease, [self.keys[row] for row in flight.rows.tolist()])
        self._leases.append(flight.lease)

    def _land_all(self) -> None:
        """Throw away what a step that ended early has left under way."""
        while self._flights:
            self._link.end(self._flights.popleft().lease)
