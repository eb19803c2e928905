"""Bytes from one place to another, outside the lock: copies with their checksums, and headers.

A checksum is taken in the pass of the copy, of what was copied: so what the header names is what lies in the arena,
whatever the writer does to its buffer meanwhile.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import BlockKey, Codec
from kvstore.kernels import native
from kvstore.store.namespaces import Namespace
from kvstore.tiers.base import DeviceArena
from kvstore.tiers.coding import encode_block
from kvstore.tiers.header import BlockHeader, check_header, first_bad_slice, pack_header, slice_crcs, unpack_header

PIECE: Final = 256 * 1024


def copy(source: memoryview, out: memoryview) -> None:
    """Copy equal lengths; the GIL is free meanwhile."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def copy_with_crc(source: memoryview, out: memoryview) -> int:
    """Copy equal lengths and return the CRC-32C of what was written."""
    if native.available():
        return native.copy_crc32c(out, source)
    src, dst = np.frombuffer(source, np.uint8), np.frombuffer(out, np.uint8)
    crc = 0
    for begin in range(0, len(out), PIECE):
        np.copyto(dst[begin : begin + PIECE], src[begin : begin + PIECE])
        crc = crc32c(out[begin : begin + PIECE], crc)
    return crc


def copy_slices(source: memoryview, out: memoryview, layers: int, slice_bytes: int, strides: tuple[int, int]) -> None:
    """Copy ``layers`` slices from distances of ``strides[0]`` to distances of ``strides[1]``."""
    if strides[0] == strides[1]:
        length = (layers - 1) * strides[0] + slice_bytes
        copy(source[:length], out[:length])
        return
    for layer in range(layers):
        begin, to = layer * strides[0], layer * strides[1]
        copy(source[begin : begin + slice_bytes], out[to : to + slice_bytes])


def store_slices(
    namespace: Namespace, names: tuple[BlockKey, BlockKey], codec: Codec, slices: memoryview, stored: memoryview
) -> bool:
    """Make the stored block of ``names`` (key, parent) from raw slices at ``raw_slice_stride``.

    ``stored`` has the stored bytes of ``codec``. False if the block holds values that INT8 can not: nothing of use
    was written then, and the block has to stay RAW.
    """
    layout = namespace.layout
    size, stride, _ = layout.of_codec(codec)
    out = stored[layout.header_bytes :]
    if codec is Codec.RAW:
        crcs = tuple(
            copy_with_crc(slices[begin : begin + size], out[begin : begin + size])
            for begin in range(0, layout.layers * stride, stride)
        )
    else:
        if not encode_block(slices, out, layout, namespace.spec.geometry):
            return False
        crcs = slice_crcs(out, layout.units_of(codec), size, stride)
    pack_header(_header(namespace, names, codec, crcs), stored)
    return True


def store_from_device(  # noqa: PLR0913  one more than six, where a value of two fields would hide what is what
    namespace: Namespace,
    names: tuple[BlockKey, BlockKey],
    wanted: Codec,
    source: tuple[DeviceArena, int],
    stored: memoryview,
    source_codec: Codec = Codec.RAW,
) -> Codec:
    """Make the stored block of ``names`` from the one at an offset of DEVICE, under ``wanted`` if that can hold it.

    A source under ``source_codec`` INT8 is copied as it is; ``wanted`` is INT8 then.

    Returns the codec used; TierError if the block has to stay raw and ``stored`` has no room for that.
    """
    layout = namespace.layout
    slices = stored[layout.header_bytes :]
    codec = wanted
    if source_codec is Codec.RAW:
        codec = source[0].encode(source[1], layout, namespace.spec, wanted, slices)
    else:
        source[0].read(source[1], slices[: layout.units_bytes(source_codec)])
    size, stride, _ = layout.of_codec(codec)
    pack_header(_header(namespace, names, codec, slice_crcs(slices, layout.units_of(codec), size, stride)), stored)
    return codec


def check_stored(namespace: Namespace, key: BlockKey, codec: Codec, stored: memoryview, *, slices: bool) -> None:
    """Raise CorruptBlock unless ``stored`` is ``key`` under ``codec``; with ``slices`` every checksum is compared."""
    header = unpack_header(stored)
    check_header(header, key, namespace.namespace_id, namespace.layout)
    if header.codec is not codec:
        raise CorruptBlock(f"codec is {header.codec.word}; expected {codec.word}", field="codec")
    if slices:
        layers = range(header.layers)
        bad = first_bad_slice(stored[header.header_bytes :], header, layers)
        if bad is not None:
            raise CorruptBlock(f"slice {bad} fails its checksum", field="slice", value=bad)


def _header(namespace: Namespace, names: tuple[BlockKey, BlockKey], codec: Codec, crcs: tuple[int, ...]) -> BlockHeader:
    layout = namespace.layout
    size, stride, _ = layout.of_codec(codec)
    return BlockHeader(
        codec, layout.units_of(codec), size, stride, layout.header_bytes, namespace.spec.block_tokens,
        namespace.namespace_id, *names, crcs,
    )  # fmt: skip
