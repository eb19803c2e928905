"""Blocks in storage, read layer by layer while a step computes: never a whole block for one layer of it.

A reader belongs to one sequence. At the start of a step it is told which layers will ask for all of its blocks, in
order, and keeps reads of what comes next under way while a piece is attended to. Pieces are bounded in bytes.

``FetchReader`` lands slices in the session's buffer, one job of the cache a piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import FetchResult
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, JobId, LeaseId, Outcome, Reason, Target
from kvstore.engine.blocks import BlockTable, Column
from kvstore.engine.cooling import key_of
from kvstore.engine.link import CacheLink

AHEAD: Final = 2
"""Pieces that are read while one is attended to."""
WAIT_MS: Final = 60_000
"""Longest wait for one piece."""
BUFFER_SHARE: Final = 2
"""One half of the session's buffer is for pieces; the other takes blocks that are being filled."""

Indices = npt.NDArray[np.int32]


class ColdLost(Exception):
    """A block in storage can not be read any more: what follows it in its sequence has to be computed again."""

    def __init__(self, key: BlockKey, reason: Reason) -> None:
        super().__init__(f"block {key.hex()[:16]} can not be read from storage: {reason.name}")
        self.key = key
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Piece:
    """Slices of one layer of some blocks: readable until the next piece is asked for.

    ``rows`` int32 [blocks] are their places in the reader's ``starts``, ``addresses`` int64 [1, blocks] those of the
    slices, ``starts`` int32 [1, blocks] the position of each block's first token.
    """

    rows: Indices
    addresses: torch.Tensor
    starts: torch.Tensor
    codec: str
    nbytes: int


class ColdReader(Protocol):
    """Reads the COLD blocks of one sequence."""

    def begin(self, layers: Sequence[int]) -> None:
        """A step begins: these layers will be read whole, in this order."""

    def read(self, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        """The slices of one layer, piece by piece; with ``chosen``, of these of ``starts`` only, out of turn.

        Raises ColdLost and LinkLost.
        """
        ...

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """Position of the first token of each block, in the order of ``chosen``."""
        ...

    def close(self) -> None:
        """Give up what is under way."""


@dataclass(slots=True)
class Tally:
    """Bytes that readers handed out, and how long they waited for them."""

    nbytes: int = 0
    waited_s: float = 0.0


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
        self._tally = tally
        self._layout = layout
        self._table = table
        self._tokens = block_tokens
        self._keys: list[BlockKey] = []
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

    def begin(self, layers: Sequence[int]) -> None:
        """See ``ColdReader``. Takes in the blocks that became COLD since the last step."""
        self._land_all()
        for index in self._table.cold.view(len(self._keys)).tolist():
            self._keys.append(key_of(self._table.blocks[index]))
            self._starts.append(index * self._tokens)
        rows = np.arange(len(self._keys), dtype=np.int32)
        self._wanted = deque((layer, part) for layer in layers for part in self._parts(rows))
        self._ask_ahead()

    def read(self, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        """See ``ColdReader``."""
        if chosen is not None:
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
        keys = [self._keys[row] for row in rows.tolist()]
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
            self._tally.nbytes += nbytes
            tables = torch.from_numpy(addresses[chosen])[None], torch.from_numpy(starts[chosen])[None]
            yield Piece(flight.rows[chosen], *tables, codec.word, nbytes)
        self._give_back(flight)

    def _landed(self, flight: _Flight) -> FetchResult:
        result = flight.result
        if Outcome.PENDING in result.outcomes:
            begun = self._link.now()
            result = self._link.call(lambda cache: cache.wait_job(flight.job, WAIT_MS))
            self._tally.waited_s += self._link.now() - begun
        for row, outcome, reason in zip(flight.rows, result.outcomes, result.reasons, strict=True):
            if outcome is not Outcome.HIT:
                self._give_back(flight)
                raise ColdLost(self._keys[int(row)], reason)
        return result

    def _give_back(self, flight: _Flight) -> None:
        self._link.release(flight.lease, [self._keys[row] for row in flight.rows.tolist()])
        self._leases.append(flight.lease)

    def _land_all(self) -> None:
        """Throw away what a step that ended early has left under way."""
        while self._flights:
            self._link.end(self._flights.popleft().lease)


class ColdReaders:
    """The readers of an engine's sequences."""

    def __init__(self, link: CacheLink, layout: BlockLayout, block_tokens: int) -> None:
        self.tally = Tally()
        self._make: Callable[[BlockTable], ColdReader] = lambda table: FetchReader(
            link, layout, table, block_tokens, self.tally
        )
        self._open: dict[int, tuple[BlockTable, ColdReader]] = {}

    def of(self, table: BlockTable) -> ColdReader:
        """The reader of a table with COLD blocks, which lives as long as the table is in use."""
        if id(table) not in self._open:
            self._open[id(table)] = table, self._make(table)
        return self._open[id(table)][1]

    def close(self, table: BlockTable) -> None:
        """The table is not used any more."""
        found = self._open.pop(id(table), None)
        if found is not None:
            found[1].close()

    def forget(self) -> None:
        """The link was lost, and everything that readers had with it."""
        self._open.clear()
