"""The HOST tier's arena and the sessions' private buffers: memfds with an allocator of ranges each.

The HOST arena is sealed with F_SEAL_FUTURE_WRITE once it is mapped here, so whoever gets its descriptor can map it
read-only and nothing else. A buffer is mapped writable by its session and by the daemon. Both are registered with
CUDA where there is a GPU (``pin``), so that copies to the device run at full speed.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Area
from kvstore.tiers import memfd
from kvstore.tiers.arena import RangeAllocator
from kvstore.tiers.versions import Versions, VersionTable, table_bytes

ARENA_BYTES_MAX: Final = 4096 * 0xFFFF_FFFF
"""Offsets are kept as page numbers of 32 bits."""

Pin = Callable[[int, int], Callable[[], None]]
"""Registers address and bytes with the device's driver, returns what undoes it; raises OSError if refused."""


class MemfdArena:
    """Shared memory with an allocator, and the versions of its pages behind it; meets ``base.Arena``.

    ``fd`` is this object's own: pass duplicates on.
    """

    def __init__(self, name: str, nbytes: int, area: Area, *, populate: bool = True) -> None:
        if not 4096 <= nbytes <= ARENA_BYTES_MAX:
            raise InvalidArgument(f"{name}.bytes", nbytes, f"4096 to {ARENA_BYTES_MAX}")
        self.area = area
        self.client_writable = area is Area.BUFFER
        self.capacity_bytes = nbytes // 4096 * 4096
        self.versions_bytes = table_bytes(self.capacity_bytes)
        self._memory = memfd.create(name, self.capacity_bytes + self.versions_bytes, populate=populate)
        self.backing = self._memory.backing
        self.warnings: tuple[str, ...] = self._memory.warnings
        self._view = memoryview(self._memory.map)
        self._ranges = RangeAllocator(self.capacity_bytes)
        behind = slice(self.capacity_bytes, self.capacity_bytes + self.versions_bytes)
        self._versions = VersionTable(self._view[behind])
        self.versions: Versions = self._versions.numbers
        self._closed = False

    @property
    def fd(self) -> int:
        """Descriptor of the memory, valid until ``close``."""
        return self._memory.fd

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the memory as mapped: the capacity and its versions, rounded up to whole pages of its kind."""
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where this process has it mapped."""
        anchor = ctypes.c_char.from_buffer(self._memory.map)
        try:
            return ctypes.addressof(anchor)
        finally:
            del anchor

    @property
    def used_bytes(self) -> int:
        """Bytes of ranges handed out, rounding included."""
        return self._ranges.used

    def allocate(self, nbytes: int) -> int | None:
        """See ``base.Arena.allocate``."""
        return self._ranges.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """See ``base.Arena.free``."""
        self._ranges.free(offset, nbytes, self._versions.bump)

    def holes_beside(self, begin: int, end: int) -> tuple[int, int]:
        """See ``base.Arena.holes_beside``."""
        return self._ranges.holes_beside(begin, end)

    @property
    def fragmentation(self) -> float:
        """See ``base.Arena.fragmentation``."""
        return self._ranges.fragmentation

    def view(self, offset: int, nbytes: int) -> memoryview:
        """See ``base.Arena.view``. ValueError outside the arena."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise ValueError(f"{offset}+{nbytes} is outside of {self.capacity_bytes} bytes")
        return self._view[offset : offset + nbytes]

    def seal_size(self) -> None:
        """Keep clients from growing or shrinking the memory."""
        memfd.seal_size(self._memory)

    def seal_read_only(self) -> None:
        """Keep clients from mapping the memory writable."""
        memfd.seal_read_only(self._memory)

    def close(self) -> None:
        """Give the memory back. Idempotent. Clients that still map it keep it alive until they go."""
        if self._closed:
            return
        self._closed = True
        self._versions.release()
        self._view.release()
        memfd.release(self._memory)


class HostArena(MemfdArena):
    """The HOST tier: read-only to every client, pinned if ``pin`` is given."""

    def __init__(self, nbytes: int, *, pin: Pin | None = None, populate: bool = True) -> None:
        super().__init__("kvstore-host", nbytes, Area.HOST, populate=populate)
        self.seal_read_only()
        self._unpin: Callable[[], None] | None = None
        if pin is not None:
            self._register(pin)

    def _register(self, pin: Pin) -> None:
        try:
            self._unpin = pin(self.address, self.mapped_bytes)
            self.backing += ", pinned"
        except OSError as error:
            self.warnings += (
                f"HOST could not be pinned ({error}), so copies to the device are slow: {locked_memory_hint()}",
            )

    def close(self) -> None:
        """Unpin, then give the memory back. Idempotent."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        super().close()


class BufferArena(MemfdArena):
    """One session's private buffer, written by its client and by cold reads that land in it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("kvstore-buffer", nbytes, Area.BUFFER)
        self.seal_size()


def locked_memory_hint() -> str:
    """What limits locked memory now, and what to set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "locked memory is not limited here; look for a container limit on memory"
    return (
        f"locked memory is limited to {soft} bytes (hard limit {hard}): ulimit -l unlimited, or LimitMEMLOCK=infinity"
    )
