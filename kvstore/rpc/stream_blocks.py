"""The blocks behind the stream methods: how a Read cuts pinned bytes and a Write gathers them. No asyncio here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.cache import CommitEntry, CommitResult, FetchResult
from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import (
    Area,
    BlockKey,
    Durability,
    LeaseId,
    NamespaceId,
    Outcome,
    Place,
    Reason,
    Target,
    Tier,
)  # fmt: skip
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.store.tables.namespaces import Namespace
from kvstore.tiers.lossless import planes_of
from kvstore.v1 import cache_pb2
from kvstore.wire import messages as convert
from kvstore.wire.chunks import NO_PLANES, ChunkCoder, codings_of, plain_data
from kvstore.wire.framing import CHUNK_BYTES_MAX

WRITE_BYTES_MAX: Final = 256 << 20
"""Most payload bytes of one Write stream, since all are held until it ends."""

WRITES_MAX: Final = 8
PEER_WRITES_MAX: Final = 6
"""Write streams of one peer, so that it never shuts all others out."""

READ_WAIT_MS: Final = 10_000
"""How long a Read waits for blocks that come from SSD or DEVICE; past it they are sent as misses."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads pinned blocks of one session; ``accept`` are numbers of the codings that it can decode."""

    session: Session
    namespace: Namespace
    layers: tuple[int, int]
    accept: Collection[int] = ()

    @property
    def layout(self) -> BlockLayout:
        """The namespace's layout."""
        return self.namespace.layout

    def fetch(self, keys: Sequence[BlockKey], lease_id: LeaseId) -> FetchResult:
        """Pin blocks in HOST, waiting for those that come from elsewhere."""
        return self.session.fetch(
            self.namespace.namespace_id,
            keys,
            Target.HOST,
            lease_id=lease_id,
            layers=self.layers,
            wait_ms=READ_WAIT_MS,
        )

    def payload_bytes(self, place: Place) -> int:
        """Bytes of the slices asked for, without padding."""
        begin, end = self.layout.unit_range(place.codec, self.layers)
        return (end - begin) * self.layout.of_codec(place.codec)[0]

    def coder(self, place: Place) -> ChunkCoder:
        """What codes the chunks of one block: nothing, unless both the policy and the caller ask for it."""
        if not any(coding in self.accept for coding in codings_of(self.namespace.policy)):
            return ChunkCoder(NO_PLANES)
        return ChunkCoder(planes_of(self.namespace.spec, place.codec, self.layout.of_codec(place.codec)[0]))

    def chunk(self, index: int, place: Place, begin: int, coder: ChunkCoder) -> cache_pb2.ReadChunk:
        """The chunk that carries bytes from ``begin`` on of a key's packed slices."""
        chunk = cache_pb2.ReadChunk(
            key_index=index,
            outcome=int(Outcome.HIT),  # type: ignore[arg-type]
            offset=begin,
            codec=place.codec,
        )
        coder.fill(chunk, self._cut(place, begin, min(begin + CHUNK_BYTES_MAX, self.payload_bytes(place))))
        return chunk

    def _cut(self, place: Place, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end`` of the packed slices."""
        slice_bytes = self.layout.of_codec(place.codec)[0]
        memory = self.session.memory(Area.HOST)
        parts = []
        while begin < end:
            unit, within = divmod(begin, slice_bytes)
            size = min(end - begin, slice_bytes - within)
            start = place.offset + unit * place.stride + within
            parts.append(memory[start : start + size])
            begin += size
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of a Write stream."""

    namespace_id: NamespaceId
    keys: list[BlockKey]
    parents: Sequence[BlockKey]
    token_ids: Sequence[int]
    durability: Durability | None

    @classmethod
    def of(cls, message: cache_pb2.WriteHeader) -> Header:
        """Check a message."""
        keys = convert.keys_of(message.keys, "header.keys")
        durability = message.durability
        return cls(
            convert.namespace_of(message.namespace_id, "header.namespace_id"),
            keys,
            convert.parents_of_entries(message.parents, len(keys), "header.parents"),
            message.token_ids,
            convert.enum_of("header.durability", durability, Durability) if durability else None,
        )


class Writer:
    """Takes the bytes of one Write stream into a session of its own, which ends with the stream."""

    def __init__(self, store: Store, header: Header, namespace: Namespace, peer: str = "") -> None:
        self._store = store
        self._peer = peer
        self._header = header
        self._spec = namespace.spec
        self._layout = layout = namespace.layout
        self._size = layout.layers * layout.raw_slice_bytes
        self._session: Session | None = None
        self._places: tuple[Place | None, ...] = ()
        self._outcomes: tuple[Outcome, ...] = ()
        self._entries: list[CommitEntry] = []
        self._key = 0
        self._offset = 0

    def open(self) -> None:
        """Open the session with room for all blocks, and reserve them."""
        room = len(self._header.keys) * self._layout.raw_stored_bytes
        self._session = self._store.open_session("write stream", buffer_bytes=room, remote=True, peer=self._peer)
        self._session.open_namespace(self._spec)
        header = self._header
        reserved = self._session.reserve(header.namespace_id, Tier.HOST, keys=header.keys, durability=header.durability)
        self._outcomes, self._places = reserved.outcomes, reserved.places
        columns = zip(reserved.reservation_ids, self._header.keys, self._header.parents, strict=True)
        self._entries = [
            CommitEntry(*entry) for entry, o in zip(columns, self._outcomes, strict=True) if o is Outcome.PENDING
        ]

    def take(self, chunk: cache_pb2.WriteChunk) -> None:
        """Check and place one chunk: in key order, without gaps."""
        if chunk.key_index != self._key or self._key >= len(self._header.keys):
            raise InvalidArgument("key_index", chunk.key_index, f"{self._key}, the key that is not yet whole")
        if chunk.offset != self._offset:
            raise InvalidArgument("offset", chunk.offset, f"{self._offset}, the end of the chunk before")
        try:
            data = plain_data(chunk, self._size - self._offset)
        except CorruptBlock as error:
            raise InvalidArgument(error.field, error.value, error.expected) from error
        place = self._places[self._key]
        if place is not None and self._session is not None:
            self._place(self._session.memory(Area.BUFFER), place, data)
        self._offset += len(data)
        if self._offset == self._size:
            self._key, self._offset = self._key + 1, 0

    def _place(self, memory: memoryview, place: Place, data: bytes | bytearray) -> None:
        slice_bytes, taken = self._layout.raw_slice_bytes, 0
        while taken < len(data):
            layer, within = divmod(self._offset + taken, slice_bytes)
            size = min(len(data) - taken, slice_bytes - within)
            start = place.offset + layer * place.stride + within
            memory[start : start + size] = data[taken : taken + size]
            taken += size

    def check_whole(self) -> None:
        """Raise InvalidArgument unless every key has all its bytes."""
        if self._key != len(self._header.keys):
            raise InvalidArgument(
                "data",
                f"{self._key} whole keys and {self._offset} bytes",
                f"{len(self._header.keys)} keys of {self._size} bytes",
            )

    def commit(self) -> CommitResult:
        """Publish what was reserved; keys that were resident before are HIT and existed."""
        result = CommitResult((), (), ())
        if self._entries and self._session is not None:
            per_key = len(self._header.token_ids) // len(self._header.keys)
            tokens = [
                token
                for index, outcome in enumerate(self._outcomes)
                if outcome is Outcome.PENDING
                for token in self._header.token_ids[index * per_key : (index + 1) * per_key]
            ]
            result = self._session.commit(
                self._header.namespace_id,
                self._entries,
                token_ids=tokens,
                durability=self._header.durability,
            )
        committed = iter(zip(result.outcomes, result.reasons, result.existed, strict=True))
        rows = [
            next(committed)
            if outcome is Outcome.PENDING
            else (Outcome.HIT, Reason.NONE, True)
            if outcome is Outcome.HIT
            else (Outcome.MISS, Reason.NO_SPACE, False)
            for outcome in self._outcomes
        ]
        return CommitResult(
            tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows), (), result.busy
        )

    def close(self) -> None:
        """End the session: what was not committed is gone. Idempotent."""
        if self._session is not None:
            self._session.close()
            self._session = None
