"""From the scheduler's shares to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Codec
from kvstore.engine.attention import AttentionStep
from kvstore.engine.scheduler import Share
from kvstore.engine.writer import KvWriter, WriteRun
from kvstore.kernels.paged import PagedBatch


@dataclass(frozen=True, slots=True)
class StepInput:
    """One flattened row of tokens.

    ``token_ids`` and ``positions`` are int64 [1, tokens]; ``rows`` int64 are the places in it whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    attention: AttentionStep


def build_step(shares: Items[Share], spec: NamespaceSpec) -> StepInput:
    """Lay the shares' tokens side by side. Rows are wanted for the last token of each share that draws."""
    geometry, layout = spec.geometry, BlockLayout.of(spec)
    counts = np.array([share.count for share in shares])
    ends = np.cumsum(counts)
    tokens = [t for s in shares for t in s.sequence.tokens[s.sequence.computed : s.sequence.computed + s.count]]
    positions = np.concatenate([np.arange(s.sequence.computed, s.sequence.computed + s.count) for s in shares])
    rows = [end - 1 for share, end in zip(shares, ends.tolist(), strict=True) if share.draws]
    firsts = (ends - counts).tolist()
    runs = [r for s, row in zip(shares, firsts, strict=True) for r in _runs(s, row, geometry.block_tokens)]
    return StepInput(
        torch.tensor([tokens]),
        torch.from_numpy(positions)[None],
        torch.tensor(rows, dtype=torch.int64),
        AttentionStep(KvWriter(runs, geometry, layout.raw_slice_stride), _batches(shares, ends, spec)),
    )


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


def _batches(shares: Items[Share], ends: npt.NDArray[np.int64], spec: NamespaceSpec) -> tuple[PagedBatch, ...]:
    """One batch a codec that occurs; raw always, since a step's own tokens lie raw."""
    size = spec.block_tokens
    contexts = [share.sequence.computed + share.count for share in shares]
    tables = [s.sequence.table.blocks[: -(-context // size)] for s, context in zip(shares, contexts, strict=True)]
    width = max(len(table) for table in tables)
    addresses = np.zeros((len(shares), width), np.int64)
    codecs = np.zeros((len(shares), width), np.int8)
    for row, table in enumerate(tables):
        addresses[row, : len(table)] = [block.address for block in table]
        codecs[row, : len(table)] = [block.codec for block in table]
    starts = torch.arange(0, width * size, size, dtype=torch.int32).expand(len(shares), width).contiguous()
    offsets = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    lengths = torch.tensor(contexts, dtype=torch.int32)
    batches = []
    for codec in Codec:
        chosen = np.where(codecs == codec, addresses, 0)
        if codec is Codec.RAW or chosen.any():
            batches.append(PagedBatch(torch.from_numpy(chosen), starts, offsets, lengths, spec.geometry, codec.word))
    return tuple(batches)
