"""Random paged batches over memory that the case owns, with unseen tokens poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch
from kvstore.kernels.quant_reference import float32_to_raw, quantise_slice

QUERY_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Case:
    """What to draw. Lists have one entry a sequence; ``memory`` holds the slices that a batch points into.

    ``spread`` multiplies every ninth channel of K, as a few channels of real keys are wide. ``distinct`` is how many
    full blocks are drawn at most; a table then names them again, which no kernel may notice.
    """

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_tokens: int = 64
    dtype: str = "float16"
    codec: str = "raw"
    contexts: tuple[int, ...] = (100,)
    queries: tuple[int, ...] = (1,)
    layers: int = 2
    keep: float = 1.0
    spread: float = 1.0
    distinct: int | None = None
    seed: int = 0
    memory: list[np.ndarray] = field(default_factory=list)

    @property
    def geometry(self) -> SliceGeometry:
        return SliceGeometry(self.kv_heads, self.head_dim, self.block_tokens, self.dtype)

    def build(self) -> tuple[torch.Tensor, PagedBatch]:
        """Draw the queries and the batch: blocks in random order at odd places, a share of them left out."""
        rng = np.random.default_rng(self.seed)
        width = max(1, max(-(-context // self.block_tokens) for context in self.contexts) + 1)
        addresses = np.zeros((len(self.contexts), width), np.int64)
        starts = np.full(addresses.shape, -7, np.int32)
        full: list[int] = []
        for sequence, context in enumerate(self.contexts):
            chosen = [s for s in range(0, context, self.block_tokens) if rng.random() < self.keep]
            columns = rng.permutation(width)[: len(chosen)]
            for column, start in zip(columns, chosen, strict=True):
                starts[sequence, column] = start
                if context - start >= self.block_tokens and len(full) == self.distinct:
                    addresses[sequence, column] = rng.choice(full)
                    continue
                addresses[sequence, column] = self._block(rng, context - start)
                if context - start >= self.block_tokens:
                    full.append(int(addresses[sequence, column]))
        offsets = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        shape = (int(offsets[-1]), self.kv_heads * self.group, self.head_dim)
        query = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(QUERY_DTYPES[self.dtype])
        table = torch.from_numpy(addresses)
        table.slices = self.memory  # the table keeps alive what it points at
        batch = PagedBatch(
            table,
            torch.from_numpy(starts),
            torch.from_numpy(offsets),
            torch.tensor(self.contexts, dtype=torch.int32),
            self.geometry,
            self.codec,
        )
        return query, batch

    def _block(self, rng: np.random.Generator, filled: int) -> int:
        """Write one block whose tokens from ``filled`` on are NaN (raw) or wild codes (int8); return its address."""
        geometry = self.geometry
        stride, size = geometry.slice_stride(self.codec), geometry.slice_bytes(self.codec)
        memory = np.full(self.layers * stride + 64, 0xFF, np.uint8)
        start = int(-memory.ctypes.data % 64)
        for layer in range(self.layers):
            offset = start + layer * stride
            memory[offset : offset + size] = self._slice(rng, filled)
        self.memory.append(memory)
        return int(memory.ctypes.data) + start

    def _slice(self, rng: np.random.Generator, filled: int) -> np.ndarray:
        geometry = self.geometry
        heads, dim, tokens = geometry.kv_heads, geometry.head_dim, geometry.block_tokens
        key = rng.standard_normal((heads, dim, tokens), dtype=np.float32)
        value = rng.standard_normal((heads, tokens, dim), dtype=np.float32)
        key[:, ::9] *= self.spread
        if self.codec == "raw":
            key[:, :, filled:] = np.nan
            value[:, filled:] = np.nan
        both = np.concatenate([key.reshape(heads, -1), value.reshape(heads, -1)], axis=1).reshape(-1)
        raw = float32_to_raw(both, geometry.dtype)
        if self.codec == "raw":
            return raw
        coded = quantise_slice(raw, geometry)
        assert coded is not None
        poison_codes(coded, geometry, filled)
        return coded


def poison_codes(coded: np.ndarray, geometry: SliceGeometry, filled: int) -> None:
    """Make the tokens from ``filled`` on wild: codes of -128 and NaN for the scale of V."""
    dim, tokens, count = geometry.head_dim, geometry.block_tokens, geometry.head_elements
    for head in coded.reshape(geometry.kv_heads, geometry.int8_head_bytes):
        head[:count].reshape(dim // 2, tokens, 2)[:, filled:] = 0x80
        values = head[count : 2 * count].reshape(tokens // 2, dim, 2)
        for token in range(filled, tokens):
            values[token % (tokens // 2), :, token // (tokens // 2)] = 0x80
        head[head.size - 2 * tokens :].reshape(tokens, 2)[filled:] = 0xFF


def plain_options(head_dim: int, **changes: object) -> AttentionOptions:
    """Options with the usual scale; ``changes`` set the rest."""
    return AttentionOptions(scale=head_dim**-0.5, **changes)  # type: ignore[arg-type]
