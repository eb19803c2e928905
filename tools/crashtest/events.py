"""What a worker tells its parent through a pipe: fixed records, so that a kill leaves whole ones behind."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

RECORD: Final = struct.Struct("<BxxxI")


class Event(IntEnum):
    """Told before (WRITING, DROPPING) or after (the rest) the tier answered."""

    READY = 1
    """The worker has recovered; its value is the number of blocks."""
    WRITING = 2
    """A block of this seed may exist from now on."""
    DURABLE = 3
    """The block was acknowledged as durable."""
    DROPPING = 4
    """The block may be gone from now on."""
    DROPPED = 5
    """The drop was acknowledged as durable."""
    CHECKED = 6
    """A block was read under load and was right."""
    WRONG = 7
    """A block was read under load and was not what was written."""
    COMMIT = 8
    """A durable write call of so many blocks was acknowledged."""
    REWRITTEN = 9
    """Segments that a compaction rewrote."""


def pack(event: Event, values: list[int]) -> bytes:
    """Records of one event."""
    return b"".join(RECORD.pack(event, value) for value in values)


def unpack(data: bytes) -> list[tuple[Event, int]]:
    """All whole records."""
    whole = len(data) // RECORD.size * RECORD.size
    return [(Event(event), value) for event, value in RECORD.iter_unpack(data[:whole])]
