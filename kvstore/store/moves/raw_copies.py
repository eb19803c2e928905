"""Raw blocks into HOST, many a call: slices, checksums of what was written, headers. Outside the lock."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.core.types import BlockKey, Codec
from kvstore.kernels import native
from kvstore.store.moves.copies import header_of
from kvstore.store.tables.namespaces import Namespace
from kvstore.tiers.copying import copy_with_crc
from kvstore.tiers.header import pack_header


class RawBlock(NamedTuple):
    """One block on its way: raw slices at ``raw_slice_stride``, and the bytes of the stored block to be made."""

    key: BlockKey
    parent: BlockKey
    slices: memoryview
    stored: memoryview


def store_raw(namespace: Namespace, blocks: Sequence[RawBlock]) -> None:
    """Make the stored blocks, all RAW. One native call copies all slices, so that no slice costs a step of Python."""
    for block, crcs in zip(blocks, _copy(namespace, blocks), strict=True):
        pack_header(header_of(namespace, (block.key, block.parent), Codec.RAW, crcs), block.stored)


def _copy(namespace: Namespace, blocks: Sequence[RawBlock]) -> Iterable[tuple[int, ...]]:
    """Copy the slices of all blocks; each block's checksums."""
    layout = namespace.layout
    size, stride, _ = layout.of_codec(Codec.RAW)
    outs: list[memoryview] = []
    sources: list[memoryview] = []
    for block in blocks:
        outs.append(block.stored[layout.header_bytes :])
        sources.append(block.slices)
    if native.available():
        lengths = (layout.layers, size, stride, stride)
        return struct.iter_unpack(f"<{layout.layers}I", native.copy_slices_crc32c(outs, sources, lengths))
    begins = range(0, layout.layers * stride, stride)
    return [
        tuple(copy_with_crc(out[begin : begin + size], source[begin : begin + size]) for begin in begins)
        for out, source in zip(outs, sources, strict=True)
    ]
