"""Payloads as the messages of the streams Read and Write, checked end to end; no I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from kvstore.client.payloads import GetPlan, GotBlocks, PutPlan
from kvstore.core.types import BlockKey, Codec, Coding, NamespaceId, Outcome, Reason
from kvstore.tiers.lossless import planes_of
from kvstore.v1 import cache_pb2
from kvstore.wire import messages as convert
from kvstore.wire.chunks import NO_PLANES, ChunkCoder, corrupt, plain_data
from kvstore.wire.framing import CHUNK_BYTES_MAX
from kvstore.wire.verbs.base import KnownNamespace

E = TypeVar("E", bound=IntEnum)

WRITE_PART_BYTES: Final = 64 << 20
"""Payload bytes of one Write stream; a longer put is several."""


def write_planes(known: KnownNamespace, lossless: bool) -> int:
    """Planes for the chunks of Write in a namespace; none unless both the daemon and the client code them."""
    if not lossless or Coding.LZ4 not in known.write_codings:
        return NO_PLANES
    return planes_of(known.spec, Codec.RAW, known.layout.raw_slice_bytes)


def write_messages(namespace_id: NamespaceId, plan: PutPlan, part: slice, planes: int = NO_PLANES) -> Iterator[bytes]:
    """Messages of one Write stream: a header, then chunks of at most 1 MiB in key order.

    With ``planes`` each takes milliseconds to make: not on an event loop.
    """
    keys = plan.keys(part)
    header = cache_pb2.WriteHeader(
        namespace_id=namespace_id,
        keys=b"".join(keys),
        parents=b"".join(plan.blocks.parents[part]),
        token_ids=plan.tokens(part),
        durability=int(plan.blocks.durability or 0),  # type: ignore[arg-type]
    )
    yield cache_pb2.WriteChunk(header=header).SerializeToString()
    for index in range(len(keys)):
        source, coder = plan.sources[part.start + index], ChunkCoder(planes)
        for offset in range(0, source.nbytes, CHUNK_BYTES_MAX):
            chunk = cache_pb2.WriteChunk(key_index=index, offset=offset)
            coder.fill(chunk, source[offset : offset + CHUNK_BYTES_MAX].tobytes())
            yield chunk.SerializeToString()


def read_request(namespace_id: NamespaceId, keys: Sequence[BlockKey], lossless: bool) -> bytes:
    """The request of a Read stream."""
    accept = [int(Coding.LZ4)] if lossless else []
    request = cache_pb2.ReadRequest(namespace_id=namespace_id, keys=b"".join(keys), accept=accept)  # type: ignore[arg-type]
    return request.SerializeToString()


def parse_chunk(payload: bytes) -> cache_pb2.ReadChunk:
    """One message of a Read stream. Raises CorruptBlock if it is none."""
    try:
        return cache_pb2.ReadChunk.FromString(payload)
    except DecodeError as error:
        raise corrupt("message", f"{len(payload)} bytes", "a ReadChunk") from error


class Assembler:
    """Gathers the chunks of a Read stream into the slots of a get."""

    def __init__(self, plan: GetPlan, count: int) -> None:
        self._plan = plan
        self._sizes = [0] * count
        self._outcomes = [Outcome.MISS] * count
        self._reasons = [Reason.TIER_UNAVAILABLE] * count
        self._codecs = [Codec.RAW] * count

    def take(self, chunk: cache_pb2.ReadChunk) -> None:
        """Place one chunk. Raises CorruptBlock if it is not what was sent.

        A coded one takes milliseconds: not on an event loop.
        """
        index = chunk.key_index
        if index >= len(self._sizes):
            raise corrupt("key_index", index, f"below {len(self._sizes)}, the count of keys that were asked for")
        outcome = _member("outcome", convert.OUTCOMES, chunk.outcome)
        self._outcomes[index], self._reasons[index] = outcome, _member("reason", convert.REASONS, chunk.reason)
        if outcome is not Outcome.HIT:
            return
        begin = self._sizes[index]
        if chunk.offset != begin:
            raise corrupt("offset", chunk.offset, f"{begin}, the end of the chunk of key {index} before")
        data = plain_data(chunk, self._plan.slot_bytes - begin)
        end = begin + len(data)
        self._plan.slot(index, end)[begin:] = data
        self._sizes[index], self._codecs[index] = end, _codec(chunk.codec)

    def result(self) -> GotBlocks:
        """The answer once the stream has ended; a block that is not whole is a miss."""
        layout = self._plan.layout
        payloads: list[memoryview | None] = []
        for index, outcome in enumerate(self._outcomes):
            whole = layout.units_of(self._codecs[index]) * layout.of_codec(self._codecs[index])[0]
            if outcome is Outcome.HIT and self._sizes[index] != whole:
                self._outcomes[index], self._reasons[index] = Outcome.MISS, Reason.TIER_UNAVAILABLE
            hit = self._outcomes[index] is Outcome.HIT
            payloads.append(self._plan.slot(index, whole) if hit else None)
        return GotBlocks(
            tuple(self._outcomes),
            tuple(self._reasons),
            tuple(payloads),
            tuple(self._codecs),
            self._plan.destination,
        )


def _codec(number: int) -> Codec:
    codec = _member("codec", convert.CODECS, number)
    try:
        _ = codec.row
    except ValueError as error:
        raise corrupt("codec", number, "the number of a codec that is known here") from error
    return codec


def _member(field: str, members: Sequence[E], number: int) -> E:
    if not 0 <= number < len(members):
        raise corrupt(field, number, f"0 to {len(members) - 1}")
    return members[number]
