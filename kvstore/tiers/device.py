"""The DEVICE tier without a GPU: a shared arena of the same shape, mapped writable by every engine of the node.

Blocks here are raw slices only. ``encode`` and ``decode`` are where a block crosses to and from the stored form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.errors import TierError
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area, Codec
from kvstore.kernels import quant
from kvstore.tiers.base import DeviceArena
from kvstore.tiers.host import MemfdArena


class MemfdDeviceArena(MemfdArena):
    """DEVICE as shared memory; meets ``base.DeviceArena``."""

    kind = "memfd"

    def __init__(self, nbytes: int, *, populate: bool = True) -> None:
        super().__init__("kvstore-device", nbytes, Area.DEVICE, populate=populate)
        self.seal_size()

    def encode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, out: memoryview) -> Codec:
        """See ``base.DeviceArena.encode``."""
        raw = self.view(offset, layout.layers * layout.raw_slice_stride)
        coded = codec is Codec.INT8
        if coded and quant.quantise(raw, out, spec.geometry, layout.layers, strides=_strides(layout)):
            return Codec.INT8
        # RAW was asked for, or the block holds NaN, Inf or values beyond fp16, which INT8 can not.
        copy_bytes(raw, out)
        return Codec.RAW

    def decode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, source: memoryview) -> None:
        """See ``base.DeviceArena.decode``."""
        raw = self.view(offset, layout.layers * layout.raw_slice_stride)
        if codec is Codec.INT8:
            quant.dequantise(source, raw, spec.geometry, layout.layers, strides=_strides(layout))
        else:
            copy_bytes(source[: len(raw)], raw)


def copy_bytes(source: memoryview, out: memoryview) -> None:
    """Copy ``source`` to the start of ``out``; the GIL is free meanwhile. TierError if there is no room."""
    if len(out) < len(source):
        raise TierError(f"{len(source)} bytes do not fit into {len(out)}")
    np.copyto(np.frombuffer(out, np.uint8)[: len(source)], np.frombuffer(source, np.uint8))


def _strides(layout: BlockLayout) -> tuple[int, int]:
    return layout.raw_slice_stride, layout.slice_stride


if TYPE_CHECKING:

    def _meets(arena: MemfdDeviceArena) -> DeviceArena:
        return arena
