"""Stored blocks made from a seed, for tests and torture tools: the same seed gives the same bytes everywhere."""

from __future__ import annotations

import hashlib
import struct

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import BlockKey, Codec
from kvstore.tiers.base import BlockWrite
from kvstore.tiers.header import BlockHeader, pack_header, slice_crcs

SMALL_SPEC = NamespaceSpec(model="small", dtype="float16", layers=3, kv_heads=1, head_dim=8, block_tokens=8)
"""Three slices of 512 bytes (raw) a block."""


class BlockMaker:
    """Makes blocks of one namespace. Seeds are any integers; equal seeds give equal keys and bytes."""

    def __init__(self, spec: NamespaceSpec = SMALL_SPEC) -> None:
        self.spec = spec
        self.layout = BlockLayout.of(spec)
        self.namespace_id = spec.namespace_id

    def key(self, seed: int) -> BlockKey:
        """Key of the block of a seed."""
        return BlockKey(hashlib.sha256(self.namespace_id + struct.pack("<q", seed)).digest())

    def payload(self, seed: int, codec: Codec = Codec.RAW) -> bytes:
        """The bytes of a block's slices, and what is behind them: noise of its own, from a hash of the seed."""
        _, stride, stored_bytes = self.layout.of_codec(codec)
        slices = hashlib.shake_128(struct.pack("<q", seed)).digest(self.layout.units_of(codec) * stride)
        return slices.ljust(stored_bytes - self.layout.header_bytes, b"\0")

    def block(self, seed: int, parent: BlockKey, codec: Codec = Codec.RAW) -> BlockWrite:
        """A whole stored block, header included."""
        slice_bytes, stride, stored_bytes = self.layout.of_codec(codec)
        stored = memoryview(bytearray(stored_bytes))
        header_bytes, layers = self.layout.header_bytes, self.layout.units_of(codec)
        stored[header_bytes:] = self.payload(seed, codec)
        slices = stored[header_bytes : header_bytes + layers * stride]
        key = self.key(seed)
        header = BlockHeader(
            codec, layers, slice_bytes, stride, header_bytes, self.spec.block_tokens, self.namespace_id, key, parent,
            slice_crcs(slices, layers, slice_bytes, stride),
        )  # fmt: skip
        pack_header(header, stored)
        return BlockWrite(key, parent, codec, stored)

    def chain(self, seeds: list[int], parent: BlockKey, codec: Codec = Codec.RAW) -> list[BlockWrite]:
        """Blocks of a consecutive chain."""
        blocks: list[BlockWrite] = []
        for seed in seeds:
            blocks.append(self.block(seed, parent, codec))
            parent = blocks[-1].key
        return blocks
