"""Whole blocks from raw slices to units under a codec and back, layer by layer where some layers stay raw.

Raw slices lie at distances of ``raw_slice_stride``, units at distances of ``slice_stride``; neither side has a header.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core.errors import TierError
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import Codec
from kvstore.kernels.layout import SliceGeometry


def encode_block(
    raw: memoryview, out: memoryview, layout: BlockLayout, geometry: SliceGeometry, codec: Codec = Codec.INT8
) -> bool:
    """Encode all layers of a block; ``raw`` and ``out`` do not overlap.

    False if the block holds values that the codec can not: ``out`` then holds nothing of use and the block has to
    stay raw.
    Where some layers stay raw, padding becomes zero, since checksums cover it.
    """
    encode = codec.row.encode
    if encode is None:
        raise TierError(f"blocks are not encoded under {codec.word}")
    strides, coded_bytes = (layout.raw_slice_stride, layout.slice_stride), geometry.slice_bytes(codec.word)
    for begin, end, raw_layer in _runs(layout):
        source, to = raw[layout.layer_offset(Codec.RAW, begin) :], out[layout.layer_offset(codec, begin) :]
        if raw_layer:
            copy_bytes(source[: layout.raw_slice_bytes], to)
            _clear(to, layout.raw_slice_bytes, layout.raw_layer_units * layout.slice_stride)
            continue
        if not encode(source, to, geometry, end - begin, strides=strides):
            return False
        if layout.raw_layers:
            for unit in range(end - begin):
                _clear(to[unit * layout.slice_stride :], coded_bytes, layout.slice_stride)
    return True


def decode_block(
    coded: memoryview, raw: memoryview, layout: BlockLayout, geometry: SliceGeometry, codec: Codec = Codec.INT8
) -> None:
    """The reverse: raw slices, in the model's dtype, of a block under a codec."""
    decode, strides = codec.row.decode, (layout.raw_slice_stride, layout.slice_stride)
    if decode is None:
        raise TierError(f"blocks are not decoded from {codec.word}")
    for begin, end, raw_layer in _runs(layout):
        source, to = coded[layout.layer_offset(codec, begin) :], raw[layout.layer_offset(Codec.RAW, begin) :]
        if raw_layer:
            copy_bytes(source[: layout.raw_slice_bytes], to)
        else:
            decode(source, to, geometry, end - begin, strides=strides)


def copy_bytes(source: memoryview, out: memoryview) -> None:
    """Copy ``source`` to the start of ``out``; the GIL is free meanwhile. TierError if there is no room."""
    if len(out) < len(source):
        raise TierError(f"{len(source)} bytes do not fit into {len(out)}")
    np.copyto(np.frombuffer(out, np.uint8)[: len(source)], np.frombuffer(source, np.uint8))


def _runs(layout: BlockLayout) -> Iterator[tuple[int, int, bool]]:
    """Half-open ranges of layers that are encoded, or not (True); a raw layer is a range of its own."""
    begin = 0
    for layer in layout.raw_layers:
        if begin < layer:
            yield begin, layer, False
        yield layer, layer + 1, True
        begin = layer + 1
    if begin < layout.layers:
        yield begin, layout.layers, False


def _clear(out: memoryview, begin: int, end: int) -> None:
    out[begin:end] = bytes(end - begin)
