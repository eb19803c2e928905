"""Whole blocks from raw slices to units under INT8 and back, layer by layer where some layers stay raw.

Raw slices lie at distances of ``raw_slice_stride``, units at distances of ``slice_stride``; neither side has a header.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core.errors import TierError
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import Codec
from kvstore.kernels import quant
from kvstore.kernels.layout import SliceGeometry


def encode_block(raw: memoryview, out: memoryview, layout: BlockLayout, geometry: SliceGeometry) -> bool:
    """Encode all layers of a block; ``raw`` and ``out`` do not overlap.

    False if the block holds values that INT8 can not: ``out`` then holds nothing of use and the block has to stay raw.
    Where some layers stay raw, padding becomes zero, since checksums cover it.
    """
    strides = (layout.raw_slice_stride, layout.slice_stride)
    for begin, end, codec in _runs(layout):
        source, to = raw[layout.layer_offset(Codec.RAW, begin) :], out[layout.layer_offset(Codec.INT8, begin) :]
        if codec is Codec.RAW:
            copy_bytes(source[: layout.raw_slice_bytes], to)
            _clear(to, layout.raw_slice_bytes, layout.raw_layer_units * layout.slice_stride)
            continue
        if not quant.quantise(source, to, geometry, end - begin, strides=strides):
            return False
        if layout.raw_layers:
            for unit in range(end - begin):
                _clear(to[unit * layout.slice_stride :], geometry.int8_bytes, layout.slice_stride)
    return True


def decode_block(coded: memoryview, raw: memoryview, layout: BlockLayout, geometry: SliceGeometry) -> None:
    """The reverse: raw slices, in the model's dtype, of a block under INT8."""
    strides = (layout.raw_slice_stride, layout.slice_stride)
    for begin, end, codec in _runs(layout):
        source, to = coded[layout.layer_offset(Codec.INT8, begin) :], raw[layout.layer_offset(Codec.RAW, begin) :]
        if codec is Codec.RAW:
            copy_bytes(source[: layout.raw_slice_bytes], to)
        else:
            quant.dequantise(source, to, geometry, end - begin, strides=strides)


def copy_bytes(source: memoryview, out: memoryview) -> None:
    """Copy ``source`` to the start of ``out``; the GIL is free meanwhile. TierError if there is no room."""
    if len(out) < len(source):
        raise TierError(f"{len(source)} bytes do not fit into {len(out)}")
    np.copyto(np.frombuffer(out, np.uint8)[: len(source)], np.frombuffer(source, np.uint8))


def _runs(layout: BlockLayout) -> Iterator[tuple[int, int, Codec]]:
    """Half-open ranges of layers that follow one another under one codec; a raw layer is a range of its own."""
    begin = 0
    for layer in layout.raw_layers:
        if begin < layer:
            yield begin, layer, Codec.INT8
        yield layer, layer + 1, Codec.RAW
        begin = layer + 1
    if begin < layout.layers:
        yield begin, layout.layers, Codec.INT8


def _clear(out: memoryview, begin: int, end: int) -> None:
    out[begin:end] = bytes(end - begin)
