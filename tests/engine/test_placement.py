"""Where a block lies changes nothing: any placement over DEVICE, HOST and storage gives the output of one place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.engine.attention import AttentionStep, ColdPart, _attend
from kvstore.engine.cold import Indices, Pass, Piece
from kvstore.kernels.attention import merge, paged_attention
from kvstore.kernels.paged import AttentionOptions, PagedBatch
from kvstore.kernels.reference import merge_reference, paged_attention_reference
from tests.kernels.cases import Case

TOLERANCE = {"raw": 1e-5, "int8": 2e-4}


class MemoryReader:
    """A ``ColdReader`` over slices in memory, in pieces of a few blocks."""

    def __init__(self, addresses: npt.NDArray[np.int64], starts: npt.NDArray[np.int32], batch: PagedBatch) -> None:
        self._addresses, self._codec = addresses, batch.codec
        self._stride = batch.geometry.slice_stride(batch.codec)
        self._size = batch.geometry.slice_bytes(batch.codec)
        self.starts = starts
        self._queued: deque[Pass] = deque()

    def take_in(self) -> None: ...

    def begin(self, passes: Sequence[Pass]) -> None:
        self._queued.extend(passes)

    def close(self) -> None: ...

    def read(self, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        if self._queued:
            asked, chosen = self._queued.popleft()
            assert asked == layer
        rows = np.arange(len(self.starts)) if chosen is None else chosen
        for begin in range(0, len(rows), 3):
            part = rows[begin : begin + 3]
            addresses = torch.from_numpy(self._addresses[part] + layer * self._stride)[None]
            yield Piece(
                part.astype(np.int32),
                addresses,
                torch.from_numpy(self.starts[part])[None],
                self._codec,
                len(part) * self._size,
            )


class Writes:
    """Nothing is written here."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None: ...


def scattered(batch: PagedBatch, draw: np.random.Generator) -> tuple[AttentionStep, npt.NDArray[np.int64]]:
    """The same context, each block at one of three places; the places are returned, -1 where there is no block."""
    addresses, starts = batch.addresses.numpy(), batch.starts.numpy()
    places = np.where(addresses != 0, draw.integers(0, 3, addresses.shape), -1)
    hot = tuple(replace(batch, addresses=torch.from_numpy(np.where(places == p, addresses, 0))) for p in (0, 1))
    cold = []
    offsets = batch.query_offsets.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        chosen = places[row] == 2
        if chosen.any():
            reader = MemoryReader(addresses[row][chosen], starts[row][chosen], batch)
            count = offsets[row + 1] - offsets[row]
            cold.append(ColdPart(reader, offsets[row], count, context, None, batch.geometry))
    return AttentionStep(Writes(), [hot, hot, hot], cold=tuple(cold)), places


@dataclass(frozen=True)
class Drawn:
    """A geometry, contexts with their queries, and what changes the scores."""

    heads: tuple[int, int]
    dim: int
    tokens: int
    shape: list[tuple[int, int]]
    codec: str
    window: int | None
    soft_cap: float | None
    sinks: bool
    seed: int


DRAWN = st.builds(
    Drawn,
    heads=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dim=st.sampled_from((8, 24, 64, 80, 128)),
    tokens=st.sampled_from((16, 32, 64)),
    shape=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 40)), min_size=1, max_size=3),
    codec=st.sampled_from(("raw", "int8")),
    window=st.sampled_from((None, None, 5, 100)),
    soft_cap=st.sampled_from((None, None, 20.0)),
    sinks=st.booleans(),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(DRAWN)
def test_any_placement_gives_the_same_output(drawn: Drawn) -> None:
    draw = np.random.default_rng(drawn.seed)
    contexts, queries = tuple(c for c, _ in drawn.shape), tuple(min(c, q) for c, q in drawn.shape)
    dtype = "float32" if drawn.codec == "raw" else "float16"
    query, batch = Case(
        *drawn.heads, drawn.dim, drawn.tokens, dtype, drawn.codec, contexts, queries, seed=drawn.seed
    ).build()
    query, heads = query.float(), drawn.heads[0] * drawn.heads[1]
    mass = torch.from_numpy(draw.standard_normal(heads).astype(np.float32)) if drawn.sinks else None
    options = AttentionOptions(drawn.dim**-0.5, drawn.window, drawn.soft_cap, mass)
    layer = int(draw.integers(0, 2))
    step, places = scattered(batch, draw)
    found = _attend(step, query, options, layer)
    together = merge([paged_attention(query, batch, options, layer=layer)], mass).out
    reference = paged_attention_reference(query, batch, options, layer=layer)
    wanted = merge_reference([reference], None if mass is None else mass.double().numpy()).out
    scale = max(float(np.abs(wanted).max()), 1e-3)
    assert float((found - together).abs().max()) / scale <= TOLERANCE[drawn.codec], places
    assert float(np.abs(found.double().numpy() - wanted).max()) / scale <= TOLERANCE[drawn.codec], places
