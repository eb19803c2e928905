"""Versions of an arena's pages: how a reader proves, after it has copied, that what it copied was what it was told.

One unsigned 64-bit number a page of 4,096 bytes, little-endian, behind the arena's own bytes in the same memory, so
that whoever maps the arena maps them too. ``Arena.free`` adds one to each page of a range *before* the range can be
handed out again, and nothing else writes them. So a reader that was told a place and its version, has copied the bytes
and then still finds the same version there knows that no byte of the range was anyone else's meanwhile: proof instead
of trust in the time that a lease had left. They begin at 1; 0 says that a place has none. The idea is that of a
sequence lock (Linux ``seqlock.h``), with the places of the store as the critical sections.

Order: the number is written under a lock whose release orders it before the bytes that come into the range later; a
reader's copy comes before its look at the number in program order, which x86-64 keeps for loads.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.namespace import PAGE_BYTES

VERSION_BYTES: Final = 8


class Versions(Protocol):
    """The number of each page, by page."""

    def __getitem__(self, page: int, /) -> int: ...


class _None:
    def __getitem__(self, page: int, /) -> int:
        return 0


NO_VERSIONS: Final[Versions] = _None()
"""What memory without versions has: 0 everywhere."""


class VersionTable:
    """The versions of one arena, in memory that is this process's to write: ``memory`` has 8 bytes a page."""

    def __init__(self, memory: memoryview) -> None:
        self._pages: NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
        self._pages[:] = 1
        self.numbers: memoryview[int] = memory.cast("Q").toreadonly()
        """The number of each page."""

    def bump(self, offset: int, nbytes: int) -> None:
        """The range is about to be handed out again: every page of it gets its next version."""
        self._pages[offset // PAGE_BYTES : (offset + nbytes + PAGE_BYTES - 1) // PAGE_BYTES] += np.uint64(1)

    def release(self) -> None:
        """Let the memory go."""
        self.numbers.release()
        del self._pages


def table_bytes(capacity_bytes: int) -> int:
    """Bytes of the table of an arena, a whole number of pages."""
    nbytes = (capacity_bytes + PAGE_BYTES - 1) // PAGE_BYTES * VERSION_BYTES
    return (nbytes + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
