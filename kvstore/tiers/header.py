"""The header of a stored block: what makes its bytes self-describing. All integers little-endian.

::

    offset  size  field
    0       8     magic "KVBLOCK1"
    8       2     version, 1
    10      1     codec (types.Codec)
    11      1     0
    12      4     units: layers, or more where some layers stay raw (docs/format-slices.md)
    16      8     slice_bytes
    24      8     slice_stride
    32      8     header_bytes, offset of the first slice
    40      4     block_tokens
    44      4     0
    48      32    namespace id
    80      32    block key
    112     32    parent key
    144     108   0
    252     4     CRC-32C of bytes 0..252 and of the slice checksums
    256     4*n   CRC-32C of each slice (its slice_bytes, not the padding), n = layers

A header is valid if and only if magic and version are known, the CRC agrees, and the lengths are those of the
namespace's layout under the codec. CRC-32C is the Castagnoli polynomial of RFC 3720.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.namespace import HEADER_FIXED_BYTES, BlockLayout
from kvstore.core.types import BlockKey, Codec, NamespaceId
from kvstore.kernels import codecs

MAGIC: Final = b"KVBLOCK1"
VERSION: Final = 1

_FIXED: Final = struct.Struct("<8sHBxIQQQI4x32s32s32s108x")
_CRC: Final = struct.Struct("<I")
_CRC_OFFSET: Final = HEADER_FIXED_BYTES - 4


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The decoded header; ``layers`` counts units (``BlockLayout``), and ``slice_crcs`` has an entry for each."""

    codec: Codec
    layers: int
    slice_bytes: int
    slice_stride: int
    header_bytes: int
    block_tokens: int
    namespace_id: NamespaceId
    key: BlockKey
    parent: BlockKey
    slice_crcs: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes from the header's start to the end of the last slice's stride."""
        return self.header_bytes + self.layers * self.slice_stride


def pack_header(header: BlockHeader, out: memoryview) -> None:
    """Write a header to the first ``header_bytes`` of ``out``; bytes after the checksums become zero."""
    crcs = struct.pack(f"<{header.layers}I", *header.slice_crcs)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header.codec,
        header.layers,
        header.slice_bytes,
        header.slice_stride,
        header.header_bytes,
        header.block_tokens,
        header.namespace_id,
        header.key,
        header.parent,
    )
    data = fixed + _CRC.pack(crc32c(crcs, crc32c(fixed))) + crcs
    out[: len(data)] = data
    out[len(data) : header.header_bytes] = bytes(header.header_bytes - len(data))


def unpack_header(data: memoryview) -> BlockHeader:
    """Read and check a header; raises CorruptBlock saying what is wrong. ``data`` may be longer than the header."""
    if len(data) < HEADER_FIXED_BYTES:
        raise CorruptBlock(f"a header of {len(data)} bytes; expected at least {HEADER_FIXED_BYTES}")
    (magic, version, codec, layers, slice_bytes, slice_stride, header_bytes, tokens, namespace, key, parent) = (
        _FIXED.unpack_from(data)
    )
    if magic != MAGIC:
        raise CorruptBlock(f"magic is {magic!r}; expected {MAGIC!r}", field="magic")
    if version != VERSION:
        raise CorruptBlock(f"version is {version}; this build reads {VERSION}", field="version")
    end = HEADER_FIXED_BYTES + 4 * layers
    if not end <= header_bytes <= len(data):
        raise CorruptBlock(
            f"header_bytes is {header_bytes} with {layers} layers in {len(data)} bytes", field="header_bytes"
        )
    (stored_crc,) = _CRC.unpack_from(data, _CRC_OFFSET)
    crcs = bytes(data[HEADER_FIXED_BYTES:end])
    if crc32c(crcs, crc32c(data[:_CRC_OFFSET])) != stored_crc:
        raise CorruptBlock("the header's checksum differs", field="crc")
    if not codecs.known(codec):
        raise CorruptBlock(f"codec is {codec}; expected one of {', '.join(codecs.words())}", field="codec")
    return BlockHeader(
        Codec(codec), layers, slice_bytes, slice_stride, header_bytes, tokens,
        NamespaceId(namespace), BlockKey(key), BlockKey(parent), struct.unpack(f"<{layers}I", crcs),
    )  # fmt: skip


def check_header(header: BlockHeader, key: BlockKey, namespace_id: NamespaceId, layout: BlockLayout) -> None:
    """Raise CorruptBlock unless the header is that of ``key`` in this namespace, with the layout's lengths."""
    if header.key != key or header.namespace_id != namespace_id:
        raise CorruptBlock(f"the block is {header.key.hex()[:16]}; expected {key.hex()[:16]}", field="key")
    slice_bytes, stride, _ = layout.of_codec(header.codec)
    found = (header.layers, header.slice_bytes, header.slice_stride, header.header_bytes)
    expected = (layout.units_of(header.codec), slice_bytes, stride, layout.header_bytes)
    if found != expected:
        raise CorruptBlock(f"lengths are {found}; expected {expected}", field="lengths")


def slice_crcs(slices: memoryview, layers: int, slice_bytes: int, slice_stride: int) -> tuple[int, ...]:
    """CRC-32C of each slice of a slice area (no header)."""
    return tuple(crc32c(slices[i * slice_stride : i * slice_stride + slice_bytes]) for i in range(layers))


def first_bad_slice(slices: memoryview, header: BlockHeader, layers: Sequence[int]) -> int | None:
    """The first of ``layers`` whose bytes fail their checksum; ``slices`` starts at the first of them."""
    for position, layer in enumerate(layers):
        begin = position * header.slice_stride
        if crc32c(slices[begin : begin + header.slice_bytes]) != header.slice_crcs[layer]:
            return layer
    return None
