"""From the scheduler's shares to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area, Codec
from kvstore.engine.attention import AttentionStep, ColdPart
from kvstore.engine.blocks import BlockTable
from kvstore.engine.cold_readers import ColdReaders
from kvstore.engine.memory import CPU
from kvstore.engine.scheduler import Share
from kvstore.engine.selection import Selector
from kvstore.engine.writer import KvWriter, WriteRun
from kvstore.kernels.paged import PagedBatch


@dataclass(frozen=True, slots=True)
class StepInput:
    """One flattened row of tokens.

    ``token_ids`` and ``positions`` are int64 [1, tokens]; ``rows`` int64 are the places in it whose logits are wanted.
    ``attended`` is the context of these rows, summed, and ``attended_int8`` the part of it that lies in int8 blocks.
    ``memory_bytes`` are those of slices that attention reads in memory, by tier.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    attention: AttentionStep
    attended: int
    attended_int8: int
    memory_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Block tables side by side, [sequences, blocks] with address 0 where there is none, and each one's context."""

    addresses: npt.NDArray[np.int64]
    codecs: npt.NDArray[np.int8]
    contexts: list[int]


@dataclass(frozen=True, slots=True)
class Cold:
    """What a step needs for blocks in storage: their readers, the sliding window of each layer (None: all), and what
    chooses among the blocks of a table and keeps ``hot_bytes`` of them."""

    readers: ColdReaders
    windows: tuple[int | None, ...]
    hot_bytes: int = 0
    selectors: WeakKeyDictionary[BlockTable, Selector] = field(default_factory=WeakKeyDictionary)

    def left_out(self, table: BlockTable) -> float:
        """Bound of the mass that the last step of a table did not read; 0 for an exact one."""
        selector = self.selectors.get(table)
        return 0.0 if selector is None else selector.left_out

    def parts(self, shares: Items[Share], firsts: Items[int], spec: NamespaceSpec) -> tuple[ColdPart, ...]:
        """A part for each share with COLD blocks; their reading begins. ``firsts`` are the shares' first rows."""
        found: list[ColdPart] = []
        last_row = 0
        for share, first in zip(shares, firsts, strict=True):
            if len(share.sequence.table.cold):
                reader = self.readers.of(share.sequence.table)
                selected = share.sequence.params.attention if share.count == 1 and share.draws else None
                reader.take_in()
                selector = None
                if selected is not None:
                    selector = self.selectors.get(share.sequence.table)
                    if selector is None:
                        left = self.hot_bytes - sum(one.hot_bytes for one in self.selectors.values())
                        selector = Selector(spec.geometry, spec.layers, left // 2, self.readers.tally)
                        self.selectors[share.sequence.table] = selector
                    selector.begin()
                context, drawn = share.sequence.computed + share.count, last_row if share.draws else None
                part = ColdPart(reader, first, share.count, context, drawn, spec.geometry, selector, selected)
                reader.begin(part.passes(self.windows if share.draws else self.windows[:-1]))
                found.append(part)
            last_row += share.draws
        return tuple(found)


def build_step(
    shares: Items[Share],
    spec: NamespaceSpec,
    device: torch.device = CPU,
    cold: Cold | None = None,
    *,
    all_rows: bool = False,
) -> StepInput:
    """Lay the shares' tokens side by side, on ``device``. Rows are wanted for the last token of a share that draws.

    The last layer attends with these rows only, but with ``all_rows``. ``cold`` is needed where blocks are COLD.
    """
    geometry, layout = spec.geometry, BlockLayout.of(spec)
    counts = np.array([share.count for share in shares])
    ends = np.cumsum(counts)
    tokens = [t for s in shares for t in s.sequence.tokens[s.sequence.computed : s.sequence.computed + s.count]]
    positions = np.concatenate([np.arange(s.sequence.computed, s.sequence.computed + s.count) for s in shares])
    rows = [end - 1 for share, end in zip(shares, ends.tolist(), strict=True) if share.draws]
    firsts = (ends - counts).tolist()
    runs = [r for s, row in zip(shares, firsts, strict=True) for r in _runs(s, row, geometry.block_tokens)]
    tables = _tables(shares, geometry.block_tokens)
    drawing = [share.draws for share in shares]
    batches = _batches(tables, ends, spec, device)
    last_rows = None
    if not all_rows:
        last_rows = torch.tensor(rows, dtype=torch.int64, device=device)
        drawn = torch.from_numpy(np.cumsum([0, *drawing]).astype(np.int32)).to(device)
        batches[-1] = tuple(replace(batch, query_offsets=drawn) for batch in batches[-1])
    writer = KvWriter(runs, geometry, layout.raw_slice_stride)
    parts = cold.parts(shares, firsts, spec) if cold is not None else ()
    in_int8 = (tables.codecs[drawing] == Codec.INT8) & (tables.addresses[drawing] != 0)
    return StepInput(
        torch.tensor([tokens], device=device),
        torch.from_numpy(positions)[None].to(device),
        torch.tensor(rows, dtype=torch.int64, device=device),
        AttentionStep(writer, batches, cold=parts, last_rows=last_rows),
        attended=sum(context for context, draws in zip(tables.contexts, drawing, strict=True) if draws),
        attended_int8=int(in_int8.sum()) * geometry.block_tokens,
        memory_bytes=_memory_bytes(shares, spec, cold.windows if cold is not None else (None,) * spec.layers),
    )


def _memory_bytes(shares: Items[Share], spec: NamespaceSpec, windows: Items[int | None]) -> dict[str, int]:
    """Bytes of slices in memory that the shares' queries see, by area; layers that stay raw count as coded."""
    layout, found = BlockLayout.of(spec), {"device": 0, "host": 0, "private": 0}
    sizes = np.array([layout.of_codec(codec)[0] for codec in (Codec.RAW, Codec.of_word(spec.codec))])
    for share in shares:
        table, begin = share.sequence.table, share.sequence.computed
        blocks = -(-(begin + share.count) // spec.block_tokens)
        layers = windows if share.draws else windows[:-1]
        for window in set(layers):
            first = 0 if window is None else max(0, begin - window + 1) // spec.block_tokens
            areas = table.areas.view(first, blocks)
            seen = sizes[(table.codecs.view(first, blocks) != Codec.RAW).astype(np.int8)]
            seen = np.where(table.addresses.view(first, blocks) != 0, seen, 0) * layers.count(window)
            sums = np.bincount(areas, seen, minlength=Area.BUFFER + 1)
            found["device"] += int(sums[Area.DEVICE] + sums[Area.BUFFER])
            found["host"] += int(sums[Area.HOST])
            found["private"] += int(sums[Area.NONE])
    return found


def _runs(share: Share, row: int, block_tokens: int) -> list[WriteRun]:
    """Where the share's tokens go, block by block."""
    runs = []
    position, end = share.sequence.computed, share.sequence.computed + share.count
    while position < end:
        index, start = divmod(position, block_tokens)
        block, count = share.sequence.table.blocks[index], min(block_tokens - start, end - position)
        runs.append(WriteRun(block.region, block.offset, start, row, count))
        position += count
        row += count
    return runs


def _tables(shares: Items[Share], block_tokens: int) -> _Tables:
    contexts = [share.sequence.computed + share.count for share in shares]
    counts = [-(-context // block_tokens) for context in contexts]
    width = max(counts)
    addresses = np.zeros((len(shares), width), np.int64)
    codecs = np.zeros((len(shares), width), np.int8)
    for row, (share, count) in enumerate(zip(shares, counts, strict=True)):
        addresses[row, :count] = share.sequence.table.addresses.view(0, count)
        codecs[row, :count] = share.sequence.table.codecs.view(0, count)
    return _Tables(addresses, codecs, contexts)


def _batches(
    tables: _Tables, ends: npt.NDArray[np.int64], spec: NamespaceSpec, device: torch.device
) -> list[tuple[PagedBatch, ...]]:
    """For each layer one batch a codec that occurs; raw always, since a step's own tokens lie raw.

    An op finds layer ``l`` at ``address + l * stride`` of its codec. Where some layers of a coded block stay raw, that
    is not where it lies: addresses are shifted so that it is, and layers of the same shift share a batch.
    """
    size, layout = spec.block_tokens, BlockLayout.of(spec)
    addresses, codecs = tables.addresses, tables.codecs
    rows, width = addresses.shape
    starts = torch.arange(0, width * size, size, dtype=torch.int32, device=device)
    starts = starts.expand(rows, width).contiguous()
    offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device)
    lengths = torch.tensor(tables.contexts, dtype=torch.int32, device=device)

    def batch(codec: Codec, chosen: npt.NDArray[np.int64]) -> PagedBatch:
        return PagedBatch(torch.from_numpy(chosen).to(device), starts, offsets, lengths, spec.geometry, codec.word)

    raw, coded = (np.where(codecs == codec, addresses, 0) for codec in (Codec.RAW, Codec.INT8))
    if not coded.any():
        return [(batch(Codec.RAW, raw),)] * layout.layers
    raw_part = batch(Codec.RAW, raw)
    made: dict[tuple[Codec, int], tuple[PagedBatch, ...]] = {}
    found = []
    for layer in range(layout.layers):
        codec = layout.layer_codec(Codec.INT8, layer)
        shift = layout.layer_offset(Codec.INT8, layer) - layer * layout.of_codec(codec)[1]
        if (codec, shift) not in made:
            shifted = np.where(coded != 0, coded + shift, 0)
            made[codec, shift] = (
                (batch(Codec.RAW, raw + shifted),) if codec is Codec.RAW else (raw_part, batch(codec, shifted))
            )
        found.append(made[codec, shift])
    return found
