"""Ids, enums and small values. Numbers of enums equal those of the protos, so the wire needs no tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, NewType

from kvstore.kernels.codecs import CodecRow, row_of

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the chained SHA-256 of a block (``keys.py``)."""

NamespaceId = NewType("NamespaceId", bytes)
"""32 bytes: the digest of a NamespaceSpec (``namespace.py``)."""

BlockName = tuple[NamespaceId, BlockKey]
"""What a block is, everywhere: a key means nothing outside its namespace, and two namespaces may have the same one."""

LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)
JobId = NewType("JobId", int)
PlanId = NewType("PlanId", int)
SessionId = NewType("SessionId", int)

KEY_BYTES: Final = 32
ROOT_PARENT: Final = BlockKey(bytes(KEY_BYTES))
"""The parent of the first block of a chain."""

BATCH_KEYS_MAX: Final = 4096
"""Most keys in one call."""


TIERS_MAX: Final = 8


class Tier(IntEnum):
    """Where copies live, hot to cold. Numbers 4 to 8 are colder storage behind SSD, where a store has some."""

    DEVICE = 1
    HOST = 2
    SSD = 3

    @classmethod
    def _missing_(cls, value: object) -> Tier | None:
        if not isinstance(value, int) or not len(cls) < value <= TIERS_MAX:
            return None
        # Not among those that iteration yields: which of them there are is the store's affair.
        colder = int.__new__(cls, value)
        colder._name_, colder._value_ = f"TIER{value}", value
        return cls._value2member_map_.setdefault(value, colder)  # type: ignore[return-value]

    @property
    def bit(self) -> int:
        """This tier's bit in a residency set."""
        return 1 << (self - 1)


class Area(IntEnum):
    """Memory that a same-host client can address."""

    NONE = 0
    DEVICE = 1
    HOST = 2
    BUFFER = 3


class Outcome(IntEnum):
    """What became of one key of a call."""

    HIT = 1
    MISS = 2
    PENDING = 3
    BUSY = 4


class Reason(IntEnum):
    """Why a key was a miss or was refused; NONE where there is nothing to explain."""

    NONE = 0
    NEVER_STORED = 1
    EVICTED = 2
    REMOVED = 3
    QUARANTINED = 4
    UNCOMMITTED = 5
    DROPPED = 6
    TIER_UNAVAILABLE = 7
    PARENT_MISSING = 8
    NO_SPACE = 9
    DEADLINE = 10
    DRAINING = 11


class Target(IntEnum):
    """Where a fetch shall make blocks readable."""

    IN_PLACE = 1
    DEVICE = 2
    HOST = 3
    BUFFER = 4


class WritePolicy(IntEnum):
    """When a block of a namespace is written to SSD."""

    THROUGH = 1
    BACK = 2
    SECOND_HIT = 3


class Durability(IntEnum):
    """What an acknowledged commit has survived to: memory, or synced data and record on SSD."""

    MEMORY = 1
    DURABLE = 2


class Codec(IntEnum):
    """How slices are encoded; the wire's numbers. What a number means is its row in ``kernels.codecs``."""

    RAW = 0
    INT8 = 1
    CODEC_2 = 2
    CODEC_3 = 3
    CODEC_4 = 4
    CODEC_5 = 5
    CODEC_6 = 6
    CODEC_7 = 7

    @classmethod
    def of_word(cls, word: str) -> Codec:
        """The codec that specs call so. ValueError if there is none."""
        return cls(row_of(word).number)

    @property
    def row(self) -> CodecRow:
        """What the codec is. ValueError if there is none of this number."""
        return row_of(int(self))

    @property
    def word(self) -> str:
        """The name that specs and ``kernels.layout`` use."""
        return self.row.word


class Coding(IntEnum):
    """How a chunk of a stream is coded on the wire beside its codec; the wire's numbers. Lossless, all of them."""

    LZ4 = 1


class Place(NamedTuple):
    """Where the slices of one block lie for a same-host reader or writer.

    Slice ``l`` (counted from the first layer of the call) starts at ``offset + l * stride`` of the area and
    has the codec's slice bytes. The bytes belong to the store; a place stays valid while the lease or the
    reservation that it came with lives. A named tuple, since calls make hundreds and a frozen dataclass takes three
    times as long to make.
    """

    area: Area
    offset: int
    stride: int
    codec: Codec = Codec.RAW
    version: int = 0
    """Of the page at ``offset`` when the place was told (``tiers/versions.py``). A reader that finds the same one there
    after its copy has copied this block's bytes. 0: the place has none."""


@dataclass(frozen=True, slots=True)
class Busy:
    """What an allocation needed and what it found."""

    tier: Tier
    needed_bytes: int
    free_bytes: int
    evictable_bytes: int
    reason: Reason = Reason.NO_SPACE
