"""Bytes from one place to another, outside the lock: copies, encoded blocks with their checksums, and headers."""

from __future__ import annotations

import numpy as np

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import BlockKey, Codec
from kvstore.store.tables.namespaces import Namespace
from kvstore.tiers.base import DeviceArena
from kvstore.tiers.coding import encode_block
from kvstore.tiers.header import BlockHeader, check_header, first_bad_slice, pack_header, slice_crcs, unpack_header


def copy(source: memoryview, out: memoryview) -> None:
    """Copy equal lengths; the GIL is free meanwhile."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def copy_slices(source: memoryview, out: memoryview, layers: int, slice_bytes: int, strides: tuple[int, int]) -> None:
    """Copy ``layers`` slices from distances of ``strides[0]`` to distances of ``strides[1]``."""
    if strides[0] == strides[1]:
        length = (layers - 1) * strides[0] + slice_bytes
        copy(source[:length], out[:length])
        return
    for layer in range(layers):
        begin, to = layer * strides[0], layer * strides[1]
        copy(source[begin : begin + slice_bytes], out[to : to + slice_bytes])


def store_encoded(
    namespace: Namespace, names: tuple[BlockKey, BlockKey], codec: Codec, slices: memoryview, stored: memoryview
) -> bool:
    """Make the stored block of ``names`` (key, parent) under ``codec`` from raw slices at ``raw_slice_stride``.

    ``stored`` has the stored bytes under it. False if the block holds values that the codec can not: nothing of use
    was written then, and the block has to stay RAW (``blockcopy.store_raw``).
    """
    layout = namespace.layout
    out = stored[layout.header_bytes :]
    if not encode_block(slices, out, layout, namespace.spec.geometry, codec):
        return False
    size, stride, _ = layout.of_codec(codec)
    crcs = slice_crcs(out, layout.units_of(codec), size, stride)
    pack_header(header_of(namespace, names, codec, crcs), stored)
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

    A source that is coded already (``source_codec``) is copied as it is; ``wanted`` is the same then.

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
    pack_header(header_of(namespace, names, codec, slice_crcs(slices, layout.units_of(codec), size, stride)), stored)
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


def header_of(
    namespace: Namespace, names: tuple[BlockKey, BlockKey], codec: Codec, crcs: tuple[int, ...]
) -> BlockHeader:
    """Header of the stored block of ``names`` (key, parent) under ``codec``, with the checksum of each of its units."""
    layout = namespace.layout
    size, stride, _ = layout.of_codec(codec)
    return BlockHeader(
        codec, layout.units_of(codec), size, stride, layout.header_bytes, namespace.spec.block_tokens,
        namespace.namespace_id, *names, crcs,
    )  # fmt: skip
