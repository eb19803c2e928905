"""The int8 codec over buffers of slices: C++ where it is built, numpy elsewhere, the same bytes from both.

The format is docs/format-slices.md; its definition in code is ``quant_reference``.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from kvstore.kernels import native, quant_reference
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.native import Buffer

__all__ = ["dequantise", "quantise"]


def quantise(
    raw: Buffer,
    coded: Buffer,
    geometry: SliceGeometry,
    slices: int,
    *,
    strides: tuple[int, int] | None = None,
    level: str | None = None,
) -> bool:
    """Encode ``slices`` raw slices into int8 slices.

    ``raw`` and ``coded`` are C-contiguous buffers, ``coded`` writable, and do not overlap; slice i begins at byte
    ``i * stride`` of each. ``strides`` is (raw, coded) and defaults to the geometry's slice strides; the last
    slice needs no padding after it. Bytes between slices are left as they are.

    Returns True when all were encoded. Returns False when a value is NaN, Inf or above 60,000 in magnitude:
    ``coded`` then holds nothing of use and the block has to stay raw. Raises ValueError for buffers that are too
    small or not contiguous, and for odd head or block sizes. ``level`` forces one of ``native.LEVELS``, for tests.
    """
    quant_reference.check_int8_geometry(geometry)
    raw_stride, coded_stride = check_buffers(raw, coded, geometry, slices, strides)
    if native.holds(geometry):
        return native.quantise(raw, coded, geometry, (raw_stride, coded_stride, slices), level)
    target = _bytes(coded)
    for index, data in enumerate(_split(raw, raw_stride, slices, geometry.raw_bytes)):
        found = quant_reference.quantise_slice(data, geometry)
        if found is None:
            return False
        target[index * coded_stride : index * coded_stride + found.size] = found
    return True


def dequantise(
    coded: Buffer,
    raw: Buffer,
    geometry: SliceGeometry,
    slices: int,
    *,
    strides: tuple[int, int] | None = None,
    level: str | None = None,
) -> None:
    """Decode ``slices`` int8 slices into raw slices of the geometry's dtype; the rest is as in ``quantise``.

    ``strides`` is (raw, coded) here too.
    """
    quant_reference.check_int8_geometry(geometry)
    raw_stride, coded_stride = check_buffers(raw, coded, geometry, slices, strides)
    if native.holds(geometry):
        native.dequantise(coded, raw, geometry, (raw_stride, coded_stride, slices), level)
        return
    target = _bytes(raw)
    for index, data in enumerate(_split(coded, coded_stride, slices, geometry.int8_bytes)):
        found = quant_reference.dequantise_slice(data, geometry)
        target[index * raw_stride : index * raw_stride + found.size] = found


def check_buffers(
    raw: Buffer, coded: Buffer, geometry: SliceGeometry, slices: int, strides: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the (raw, coded) strides in bytes; raise ValueError that names what does not fit."""
    if slices < 0:
        raise ValueError(f"slices is {slices}; it must not be negative")
    found = strides or (geometry.slice_stride("raw"), geometry.slice_stride("int8"))
    sizes = (geometry.raw_bytes, geometry.int8_bytes)
    for name, buffer, stride, size in zip(("raw", "coded"), (raw, coded), found, sizes, strict=True):
        if stride < size:
            raise ValueError(f"the {name} stride is {stride}; it must be at least {size}, the bytes of a slice")
        view = _view(buffer)
        if not view.c_contiguous:
            raise ValueError(f"{name} is not C-contiguous; give a contiguous buffer of bytes")
        needed = (slices - 1) * stride + size if slices else 0
        if view.nbytes < needed:
            raise ValueError(f"{name} has {view.nbytes} bytes; {slices} slices need {needed}")
    return found


def _view(buffer: Buffer) -> memoryview:
    return memoryview(cast(bytes, buffer))  # the stubs for Python 3.11 do not know that arrays export memory


def _bytes(buffer: Buffer) -> quant_reference.Bytes:
    return np.frombuffer(_view(buffer).cast("B"), dtype=np.uint8)


def _split(buffer: Buffer, stride: int, slices: int, size: int) -> list[quant_reference.Bytes]:
    data = _bytes(buffer)
    return [data[index * stride : index * stride + size] for index in range(slices)]
