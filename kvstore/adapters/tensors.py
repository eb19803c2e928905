"""Between torch tensors and blocks: the bytes of a block's slices, and the digest of a model's weights."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import BATCH_KEYS_MAX, Codec
from kvstore.kernels.layout import SliceGeometry

PART_BYTES: Final = 256 << 20
"""Payloads that are in this process's memory beside the tensors, at most."""


class BlockCoder:
    """Payloads of a namespace's blocks as tensors: raw slices, layer by layer, as ``kernels/layout.py`` has them."""

    def __init__(self, spec: NamespaceSpec) -> None:
        self.block_tokens = spec.block_tokens
        self._geometry: SliceGeometry = spec.geometry
        self._layout = BlockLayout.of(spec)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)

    @property
    def blocks_of_a_part(self) -> int:
        """Blocks that one call moves."""
        payload = self._layout.layers * self._layout.raw_slice_bytes
        return min(BATCH_KEYS_MAX, max(1, PART_BYTES // payload))

    def empty(self, rows: int, tokens: int) -> torch.Tensor:
        """Zeros, [rows, heads, tokens, head_dim]: padding has them."""
        return torch.zeros(rows, self._geometry.kv_heads, tokens, self._geometry.head_dim, dtype=self._dtype)

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether K and V are [rows, heads, tokens, head_dim] as the namespace says."""
        shape = (self._geometry.kv_heads, self._geometry.head_dim)
        return all(
            tensor.dtype is self._dtype and tensor.ndim == 4 and (tensor.shape[1], tensor.shape[3]) == shape
            for tensor in (keys, values)
        )

    def payload(self, layers: list[tuple[torch.Tensor, torch.Tensor]], row: int, column: int) -> memoryview:
        """Payload of a block: the tokens from ``column`` of each layer's K and V, [rows, heads, tokens, head_dim]."""
        whole = torch.empty(len(layers), self._geometry.raw_bytes // self._geometry.itemsize, dtype=self._dtype)
        end = column + self.block_tokens
        for layer, (keys, values) in enumerate(layers):
            k, v = self._parts(whole[layer])
            k.copy_(keys[row, :, column:end])
            v.copy_(values[row, :, column:end])
        return whole.view(-1).view(torch.uint8).numpy().data

    def raw(self, payload: memoryview, codec: Codec) -> torch.Tensor:
        """A payload that ``get`` answered, as [layers, elements of a slice] in the model's dtype."""
        layout = self._layout
        size = layout.raw_slice_bytes
        if codec is Codec.RAW:
            data = np.frombuffer(payload, np.uint8, layout.layers * size)
        else:
            decode = codec.row.decode
            if decode is None:
                raise InvalidArgument("codec", codec.word, "one that decodes")
            data = np.empty(layout.layers * size, np.uint8)
            strides = (size, layout.slice_bytes)
            decode(payload, data.data, self._geometry, layout.layers, strides=strides)
        return torch.from_numpy(data).view(self._dtype).view(layout.layers, -1)

    def split(self, block: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [heads, tokens, head_dim], as views."""
        return self._parts(block[layer])

    def _parts(self, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, width, tokens = self._geometry.kv_heads, self._geometry.head_dim, self.block_tokens
        both = piece.view(heads, 2, width * tokens)
        return both[:, 0].view(heads, width, tokens).transpose(1, 2), both[:, 1].view(heads, tokens, width)


def weights_digest(model: Any) -> str:
    """SHA-256, in hex, over names, shapes, dtypes and bytes of all that a model computes with, on any device."""
    named = dict(model.state_dict())
    named.update(model.named_buffers())  # Tables that files do not have, such as rotary frequencies.
    whole = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, digest in zip(sorted(named), pool.map(_digest, (named[n] for n in sorted(named))), strict=True):
            whole.update(f"{name}\0".encode() + digest)
    return whole.hexdigest()


def weights_stamp(model: Any) -> object:
    """Equal while the weights are the same tensors, unchanged: where each lies, and its version where it has one."""
    return [
        (name, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for name, tensor in model.named_parameters()
    ]


def _digest(tensor: Any) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
    if isinstance(tensor, torch.Tensor) and tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
