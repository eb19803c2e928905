"""What a tier promises and what its caller guarantees.

An *arena* tier (DEVICE, HOST, and each session's buffer) is memory allocated once at start; the store asks
for ranges and owns them until it frees them. The *disk* tier (SSD) names what it holds by handles. All
methods are synchronous and thread-safe; a tier has a lock of its own for its own tables and never calls
back into the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Area, BlockKey, BlockName, Codec, NamespaceId, Tier
from kvstore.tiers.versions import Versions

DiskHandle = NewType("DiskHandle", int)
"""Names one block on SSD while the daemon runs: 0 <= handle < 2**31. Stays the same when the block is rewritten."""


class Arena(Protocol):
    """Memory of fixed size, handed out in page-aligned ranges."""

    area: Area
    client_writable: bool
    """Whether sessions may map it writable: what they write elsewhere is copied here when it is committed."""
    capacity_bytes: int
    backing: str
    """For people: "memfd, 2 MiB hugetlb pages"."""
    warnings: tuple[str, ...]
    """Loud things an operator should know, each with the command that mends it."""
    versions: Versions
    """The version of each page, which ``free`` raises before a range can be handed out again; see ``versions.py``."""

    @property
    def used_bytes(self) -> int:
        """Bytes of ranges handed out, rounding included."""

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of at least ``nbytes``, a multiple of 4,096, or None. O(log n)."""

    def free(self, offset: int, nbytes: int) -> None:
        """Give back a range exactly as it was allocated. ValueError if it was not."""

    def holes_beside(self, begin: int, end: int) -> tuple[int, int]:
        """Bytes of the hole that ends at offset ``begin``, and of the one that begins at ``end``; 0 for none. O(1)."""

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lie outside of the largest hole; 0 where nothing is free."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The range as writable bytes of this process. The caller lets the view go before it frees the range."""

    def close(self) -> None:
        """Unmap and forget. Ranges still handed out become invalid."""


class DeviceArena(Arena, Protocol):
    """The DEVICE tier, where engines compute: blocks without headers, raw or (where the policy says so) INT8."""

    kind: str
    """ "memfd" or "cuda-ipc"; what a client needs to map it comes from ``export``."""

    def encode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, out: memoryview) -> Codec:
        """Copy the block at ``offset`` to the slices of a stored block, encoding it on the way.

        ``out`` is the slice area (no header) of a HOST range. Returns the codec used: RAW where ``codec`` was
        INT8 but the block holds NaN or Inf (then ``out`` must have room for raw slices, else TierError).
        """

    def decode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, source: memoryview) -> None:
        """Fill the raw block at ``offset`` from the slices of a stored block under ``codec``."""

    def read(self, offset: int, out: memoryview) -> None:
        """Copy bytes at ``offset`` out as they are."""

    def write(self, offset: int, source: memoryview) -> None:
        """Copy bytes to ``offset`` as they are."""


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One block to be written to SSD: a whole stored block, header included, checksums filled in.

    The caller keeps ``stored`` unchanged until the write returns.
    """

    key: BlockKey
    parent: BlockKey
    codec: Codec
    stored: memoryview


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block, or a range of its units (layers, mostly: see ``BlockLayout``), to be read from SSD.

    Without ``layers`` ``into`` is filled with the whole stored block, header included. With
    ``layers = (begin, end)`` it is filled with these slices only, at distances of the slice stride.
    The caller keeps the memory until the read returns; after an error its bytes are undefined. A handle that by now
    names another block than (``namespace_id``, ``key``) is GONE; without ``namespace_id`` the key alone is compared.
    """

    handle: DiskHandle
    key: BlockKey
    into: memoryview
    layers: tuple[int, int] | None = None
    namespace_id: NamespaceId | None = None


class ReadStatus(Enum):
    """What became of one BlockRead."""

    OK = "ok"
    CORRUPT = "corrupt"
    """A checksum, the key or a length differs. The block was quarantined and its handle is gone."""
    UNAVAILABLE = "unavailable"
    """An I/O error, a deadline passed, or the tier is degraded. The handle stays."""
    GONE = "gone"
    """The handle is unknown: dropped while the read waited."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file that native code reads slices from: ``fd`` is the system's, and stays open until it is released.

    ``version`` (uint64 [1]) is raised before other bytes can come where slices lay; ``seen`` is what it was when they
    were located. So bytes that were read while it was ``seen``, before and after, are those that were meant.
    """

    fd: int
    version: NDArray[np.uint64]
    seen: int
    release: Callable[[], None]
    """Called once, when nothing is read from it any more."""

    @property
    def stale(self) -> bool:
        """Whether what was located in it is elsewhere now."""
        return int(self.version[0]) != self.seen


@dataclass(frozen=True, slots=True)
class Located:
    """Where units of blocks lie, as columns by block; those of a block whose status is not OK mean nothing.

    The caller releases each of ``files`` once it reads no more from it; until then it stays open.
    """

    status: list[ReadStatus]
    files: list[HeldFile]
    file: NDArray[np.int32]
    """Index in ``files``; -1 where the status is not OK."""
    offsets: NDArray[np.uint64]
    """In the file, [blocks, units]; not aligned to anything."""
    lengths: NDArray[np.uint32]
    """Bytes in the file, [blocks, units]; fewer than the unit's own where it is coded (``lossless.py``)."""
    crcs: NDArray[np.uint32]
    """CRC-32C of the unit, decoded, [blocks, units]."""
    planes: NDArray[np.uint8]
    """Byte planes of coded units; 0 where they lie as they are."""


class RecoveredBlock(NamedTuple):
    """One block found on disk at start; ``age_order`` grows with recency of writing. A named tuple, since a start makes
    one for each block."""

    handle: DiskHandle
    namespace_id: NamespaceId
    key: BlockKey
    parent: BlockKey
    codec: Codec
    age_order: int


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found: whole blocks, and what it cut or set aside."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    cut_bytes: int = 0
    quarantined: int = 0
    orphans_removed: int = 0
    mode: str = "normal"


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The ledger of a tier; ``ledger_bytes`` is what ``du`` says of its directory, if it has one."""

    directory: str
    cap_bytes: int
    ledger_bytes: int
    free_floor_bytes: int
    filesystem_free_bytes: int
    quarantine_bytes: int = 0
    metadata_bytes: int = 0
    live_bytes: int = 0
    fragmentation: float = 0.0
    write_amplification: float = 1.0
    coded_saved_bytes: int = 0
    """Bytes that live blocks would take more if their slices were not coded."""


@dataclass(frozen=True, slots=True)
class DiskState:
    """Health: "ready" or "degraded", with the last error for people."""

    state: str
    last_error: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    room_bytes: int | None = None
    """What it could fill as its filesystem is, or was a moment ago: its own bytes and those that nobody has. None: not
    known."""

    @property
    def ready(self) -> bool:
        """Whether it takes writes and answers reads."""
        return self.state == "ready"


class DiskTier(Protocol):
    """Storage that is asked: SSD, and what stands behind it. docs/format.md says how SSD meets it.

    How the space of dropped blocks comes back is the tier's own affair; one that wants the store to say when meets
    ``maintained.Maintained``, too.
    """

    capacity_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of the directory, as the ledger counts them."""

    @property
    def state(self) -> DiskState:
        """Health and counters."""

    def recover(self) -> Iterator[RecoveredBlock]:
        """Rebuild the tables and yield every whole block, oldest first. Called once, first; exhaust it."""

    @property
    def report(self) -> RecoveryReport:
        """The report of the recovery; complete once ``recover`` is exhausted."""

    def namespaces(self) -> Sequence[tuple[NamespaceSpec, NamespacePolicy, str]]:
        """Specs, policies and names kept on disk."""

    def put_namespace(self, spec: NamespaceSpec, policy: NamespacePolicy, name: str) -> None:
        """Keep a spec durably, before the first block of it is written. Idempotent.

        A tier may forget a namespace once it holds no block of it: it is put again before the next one.
        """

    def write(self, namespace_id: NamespaceId, blocks: Sequence[BlockWrite], *, durable: bool) -> list[DiskHandle]:
        """Write a run of consecutive blocks of one chain; all or nothing.

        With ``durable`` returns after data and record are synced (concurrent callers share syncs). Raises
        TierFull (the store then drops blocks and tries again) or TierUnavailable.
        """

    def read(self, reads: Sequence[BlockRead]) -> list[ReadStatus]:
        """Read blocks or slices, checking every slice asked for; adjacent ones become one I/O. Never raises for I/O."""

    def locate(self, blocks: Sequence[tuple[DiskHandle, BlockName]], units: tuple[int, int]) -> Located | None:
        """Say where these units of blocks of one codec lie, for native code that reads them many times.

        None from a tier that has no files to read from: its blocks are read with ``read``. Never raises for I/O. What
        is located may move at any time, which ``HeldFile.version`` tells; then it is located again.
        """

    def drop(self, handles: Sequence[DiskHandle], names: Sequence[BlockName] | None = None) -> None:
        """Forget blocks; idempotent. Durable with the next sync. Their space comes back to later writes.

        With ``names``, one a handle, a handle that names another block by now is left alone: the tier uses handles
        again, also those of blocks that it has dropped by itself.
        """

    def touch(self, handles: Sequence[DiskHandle]) -> None:
        """These blocks were used, the coldest named first: a later recovery yields them behind all that were not.

        As precisely as the tier cares to: a run of blocks may count as one. It costs no I/O of its own, and is kept
        at a clean end; after a kill some of it may be forgotten.
        """

    def lost(self) -> Sequence[tuple[DiskHandle, BlockName]]:
        """Blocks that the tier has dropped by itself since this was asked last, though their write was answered.

        Their commit failed, or their file was removed from outside. A read finds them GONE.
        """

    def flush(self) -> None:
        """Return when everything written so far is durable. Raises TierUnavailable."""

    def verify(self, handle: DiskHandle, name: BlockName) -> ReadStatus:
        """Read one whole block back and compare its checksums."""

    def usage(self) -> DiskUsage:
        """The ledger."""

    def close(self) -> None:
        """Flush, write a checkpoint, release the directory. Idempotent."""


TIERS_COLD_TO_HOT = (Tier.SSD, Tier.HOST, Tier.DEVICE)
