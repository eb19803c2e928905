"""Payloads as the messages of the streams Read and Write, checked end to end; no I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from crc32c import crc32c

from kvstore.client.payloads import GetPlan, GotBlocks, PutPlan
from kvstore.core.errors import CorruptBlock
from kvstore.core.types import BlockKey, Codec, NamespaceId, Outcome, Reason
from kvstore.rpc import convert
from kvstore.rpc.framing import CHUNK_BYTES_MAX
from kvstore.v1 import cache_pb2

WRITE_PART_BYTES: Final = 64 << 20
"""Payload bytes of one Write stream; a longer put is several."""


def write_messages(namespace_id: NamespaceId, plan: PutPlan, part: slice) -> Iterator[bytes]:
    """Messages of one Write stream: a header, then chunks of at most 1 MiB in key order."""
    keys = plan.keys(part)
    header = cache_pb2.WriteHeader(
        namespace_id=namespace_id,
        keys=b"".join(keys),
        parents=b"".join(plan.blocks.parents[part]),
        token_ids=plan.tokens(range(part.start, part.stop)),
        durability=int(plan.blocks.durability or 0),  # type: ignore[arg-type]
    )
    yield cache_pb2.WriteChunk(header=header).SerializeToString()
    for index in range(len(keys)):
        source = plan.sources[part.start + index]
        for offset in range(0, source.size, CHUNK_BYTES_MAX):
            data = source[offset : offset + CHUNK_BYTES_MAX].tobytes()
            chunk = cache_pb2.WriteChunk(key_index=index, offset=offset, data=data, crc32c=crc32c(data))
            yield chunk.SerializeToString()


def read_request(namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> bytes:
    """The request of a Read stream."""
    return cache_pb2.ReadRequest(namespace_id=namespace_id, keys=b"".join(keys)).SerializeToString()


class Assembler:
    """Gathers the chunks of a Read stream into the slots of a get."""

    def __init__(self, plan: GetPlan, count: int) -> None:
        self._plan = plan
        self._sizes = [0] * count
        self._outcomes = [Outcome.MISS] * count
        self._reasons = [Reason.TIER_UNAVAILABLE] * count
        self._codecs = [Codec.RAW] * count

    def take(self, payload: bytes) -> None:
        """Place one chunk. Raises CorruptBlock if it is not what was sent."""
        chunk = cache_pb2.ReadChunk.FromString(payload)
        index = chunk.key_index
        if index >= len(self._sizes):
            raise CorruptBlock(f"a chunk of key {index}; {len(self._sizes)} were asked for", field="key_index")
        outcome = convert.OUTCOMES[chunk.outcome]
        self._outcomes[index], self._reasons[index] = outcome, convert.REASONS[chunk.reason]
        if outcome is not Outcome.HIT:
            return
        data = chunk.data
        if crc32c(data) != chunk.crc32c:
            raise CorruptBlock(f"a chunk of key {index} fails its checksum", field="crc32c")
        end = chunk.offset + len(data)
        if chunk.offset != self._sizes[index] or end > self._plan.slot_bytes:
            raise CorruptBlock(f"a chunk of key {index} begins at {chunk.offset}", field="offset")
        self._plan.slot(index, end)[chunk.offset :] = np.frombuffer(data, np.uint8)
        self._sizes[index], self._codecs[index] = end, convert.CODECS[chunk.codec]

    def result(self) -> GotBlocks:
        """The answer once the stream has ended; a block that is not whole is a miss."""
        layout = self._plan.layout
        payloads: list[memoryview | None] = []
        for index, outcome in enumerate(self._outcomes):
            whole = layout.units_of(self._codecs[index]) * layout.of_codec(self._codecs[index])[0]
            if outcome is Outcome.HIT and self._sizes[index] != whole:
                self._outcomes[index], self._reasons[index] = Outcome.MISS, Reason.TIER_UNAVAILABLE
            hit = self._outcomes[index] is Outcome.HIT
            payloads.append(self._plan.slot(index, whole).data if hit else None)
        return GotBlocks(
            tuple(self._outcomes),
            tuple(self._reasons),
            tuple(payloads),
            tuple(self._codecs),
            self._plan.destination.data,
        )
