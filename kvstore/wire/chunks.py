"""Chunks of the streams Read and Write as they go over the wire: plain, or coded where that saves a twentieth.

Offsets and checksums are always those of the plain bytes, so a chunk that decodes to anything else than what was sent
is found by its CRC-32C like one that was damaged on the way. Coding takes milliseconds a chunk: never on an event loop.
"""

from __future__ import annotations

from typing import Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Coding
from kvstore.tiers.lossless import PLANES, decode_slice, encode_slice
from kvstore.v1 import cache_pb2
from kvstore.wire.framing import CHUNK_BYTES_MAX

AnyChunk = cache_pb2.ReadChunk | cache_pb2.WriteChunk

NO_PLANES: Final = 0
"""In place of a number of planes: the chunks of this block go plain."""


def codings_of(policy: NamespacePolicy) -> list[Coding]:
    """Codings that a namespace's policy asks for on the wire."""
    return [Coding.LZ4] if policy.lossless == "lz4" else []


_KNOWN: Final = frozenset(map(int, Coding))


class ChunkCoder:
    """Codes the chunks of one block, in their order.

    The first chunk decides for the block: if it does not save enough, the others are sent without a try, since what
    does not pay (int8, most fp16) does so nowhere in a block and only costs time.
    """

    def __init__(self, planes: int) -> None:
        self._planes = planes

    def fill(self, chunk: AnyChunk, data: bytes) -> None:
        """Set data, checksum and coding of a chunk whose offset is set. ``data`` is a multiple of ``planes`` bytes."""
        chunk.crc32c = crc32c(data)
        chunk.data = data
        if not self._planes:
            return
        coded = encode_slice(memoryview(data), self._planes)
        if len(coded) < len(data):
            chunk.data = bytes(coded)
            chunk.coded.CopyFrom(
                cache_pb2.ChunkCoding(coding=int(Coding.LZ4), plain_bytes=len(data), planes=self._planes)  # type: ignore[arg-type]
            )
        elif not chunk.offset:
            self._planes = NO_PLANES


def plain_bytes(chunk: AnyChunk) -> int:
    """Bytes of a chunk before coding, as it says itself."""
    return chunk.coded.plain_bytes if chunk.HasField("coded") else len(chunk.data)


def plain_data(chunk: AnyChunk, room: int) -> bytes | bytearray:
    """The plain bytes of a chunk, checked against its CRC-32C; at most ``room`` and 1 MiB, whatever the chunk says.

    Raises CorruptBlock naming the field: nothing is decoded before its bounds are known to be right.
    """
    data: bytes | bytearray = chunk.data
    if not 1 <= len(data) <= CHUNK_BYTES_MAX:
        raise corrupt("data", f"{len(data)} bytes", f"1 to {CHUNK_BYTES_MAX} bytes")
    size = plain_bytes(chunk)
    if chunk.HasField("coded"):
        _check_coding(chunk.coded)
    if size > room:
        raise corrupt("data", f"{size} bytes", f"at most {room} bytes, which the key has left")
    if chunk.HasField("coded"):
        data = _decoded(chunk.data, chunk.coded)
    found = crc32c(data)
    if found != chunk.crc32c:
        raise corrupt("crc32c", chunk.crc32c, f"{found}, the CRC-32C of the plain bytes")
    return data


def corrupt(field: str, value: object, expected: str) -> CorruptBlock:
    """What a reader raises for a chunk that is not what was sent."""
    return CorruptBlock(f"{field} is {value}; expected {expected}", field=field, value=value, expected=expected)


def _check_coding(coded: cache_pb2.ChunkCoding) -> None:
    if coded.coding not in _KNOWN:
        known = ", ".join(f"{coding.value} ({coding.name})" for coding in Coding)
        raise corrupt("coded.coding", coded.coding, f"one of {known}; or coded unset, for plain bytes")
    if coded.planes not in PLANES:
        raise corrupt("coded.planes", coded.planes, f"one of {', '.join(map(str, PLANES))}")
    if not 1 <= coded.plain_bytes <= CHUNK_BYTES_MAX or coded.plain_bytes % coded.planes:
        expected = f"1 to {CHUNK_BYTES_MAX}, a multiple of planes ({coded.planes})"
        raise corrupt("coded.plain_bytes", coded.plain_bytes, expected)


def _decoded(data: bytes, coded: cache_pb2.ChunkCoding) -> bytearray:
    plain = bytearray(coded.plain_bytes)
    try:
        decode_slice(memoryview(data), coded.planes, memoryview(plain))
    except CorruptBlock as error:
        expected = f"an LZ4 block of {coded.plain_bytes} bytes"
        raise corrupt("data", f"{len(data)} bytes that are no such block", expected) from error
    return plain
