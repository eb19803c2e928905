"""The lossless coding of slices, for SSD and the wire: byte planes, then LZ4, kept where it saves a twentieth.

A slice of ``planes``-byte numbers is split into planes first (all first bytes, all second bytes, ...), since the bytes
that hold sign and exponent repeat and those of the mantissa do not. ``planes`` is 2 for fp16 and bf16, 4 for fp32 and
1 (nothing is split) for int8 and opaque slices. A coded slice that is as long as the slice itself is the slice itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import lz4.block
import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import CorruptBlock
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import Codec
from kvstore.kernels.layout import DTYPE_BYTES

SAVING_MIN: Final = 0.05
"""Share that a coded slice, and a coded extent, must save: less is not worth the time of decoding."""
CODED_SLICE_BYTES_MAX: Final = 1 << 20
"""Larger slices stay as they are: a coded slice is read and decoded in one piece."""
PLANES: Final = (1, 2, 4)


def planes_of(spec: NamespaceSpec, codec: Codec, slice_bytes: int) -> int:
    """Bytes of a number in the slices of a namespace's blocks under a codec; 1 where they are no plain numbers."""
    if codec is not Codec.RAW or spec.opaque_slice_bytes:
        return 1
    size = DTYPE_BYTES[spec.dtype]
    return size if slice_bytes % size == 0 else 1


def encode_slice(data: memoryview, planes: int) -> bytes | memoryview:
    """The coded slice, or ``data`` itself where that saves too little."""
    coded: bytes = lz4.block.compress(_split(data, planes) if planes > 1 else data, store_size=False)
    return coded if len(coded) <= (1 - SAVING_MIN) * len(data) else data


def _split(data: memoryview, planes: int) -> NDArray[np.uint8]:
    """Plane after plane."""
    numbers = np.frombuffer(data, dtype=f"<u{planes}")
    split = np.empty((planes, len(numbers)), dtype=np.uint8)
    for plane in range(planes):
        np.copyto(split[plane], numbers >> (8 * plane), casting="unsafe")
    return split


def decode_slice(coded: memoryview, planes: int, into: memoryview) -> None:
    """Fill ``into``, a whole slice; CorruptBlock if ``coded`` is nothing that was coded from one of its length."""
    try:
        data = lz4.block.decompress(coded, uncompressed_size=len(into))
    except lz4.block.LZ4BlockError as error:
        raise CorruptBlock(f"a coded slice of {len(coded)} bytes: {error}", field="coding") from error
    if len(data) != len(into):
        raise CorruptBlock(f"a coded slice gives {len(data)} bytes; expected {len(into)}", field="coding")
    split = np.frombuffer(data, dtype=np.uint8).reshape(planes, -1)
    target = np.frombuffer(into, dtype=f"<u{planes}")
    np.copyto(target, split[0])
    # Whole numbers are shifted and joined: several times faster than strided copies of single bytes.
    for plane in range(1, planes):
        target |= split[plane].astype(target.dtype) << (8 * plane)


def encode_blocks(
    blocks: Sequence[memoryview], planes: int, lengths: tuple[int, int, int]
) -> list[list[bytes | memoryview]]:
    """Code the slices of some blocks, without headers; by layer, then block. ``lengths`` is layers, bytes, stride."""
    layers, slice_bytes, stride = lengths
    return [
        [encode_slice(block[layer * stride : layer * stride + slice_bytes], planes) for block in blocks]
        for layer in range(layers)
    ]
