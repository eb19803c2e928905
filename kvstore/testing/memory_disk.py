"""A disk tier in memory, with switches for what disks do: fill up, fail, stall, corrupt, lose what was not synced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from kvstore.core.errors import CorruptBlock, TierFull, TierUnavailable
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.stop import Stop, never
from kvstore.core.types import BlockKey, BlockName, Codec, NamespaceId
from kvstore.tiers.base import (
    BlockRead,
    BlockWrite,
    DiskHandle,
    DiskState,
    DiskTier,
    DiskUsage,
    Located,
    ReadStatus,
    RecoveredBlock,
    RecoveryReport,
)
from kvstore.tiers.header import check_header, first_bad_slice, unpack_header
from kvstore.tiers.maintained import CompactReport, Maintained, QuarantineEntry, SegmentUsage


@dataclass(slots=True)
class _Stored:
    namespace_id: NamespaceId
    key: BlockKey
    parent: BlockKey
    codec: Codec
    data: bytearray
    synced: bool


def _nothing() -> None:
    """The hook that is set when nothing has to happen."""


class MemoryStorage:
    """Meets ``DiskTier``, and gives space back by itself.

    Set ``degraded`` or ``fail_writes`` at any time; ``before_read`` and ``before_write`` are called (without a lock) at
    the start of each call, so that a test can stop it there.
    """

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self.degraded = False
        self.fail_writes: type[TierUnavailable] | type[TierFull] | None = None
        self.unreadable: set[BlockKey] = set()
        self.before_read: Callable[[], None] = _nothing
        self.before_write: Callable[[], None] = _nothing
        self.writes: list[tuple[BlockKey, ...]] = []
        self.reads: list[tuple[BlockKey, ...]] = []
        self.flushes = 0
        self._lock = threading.Lock()
        self._specs: dict[NamespaceId, tuple[NamespaceSpec, NamespacePolicy, str]] = {}
        self._blocks: dict[int, _Stored] = {}
        self._next = 0
        self._report = RecoveryReport()
        self._quarantined: list[QuarantineEntry] = []

    # -- for tests -----------------------------------------------------------------------------------------------

    def keys(self) -> list[BlockKey]:
        """Keys that are stored, in order of writing and of use."""
        with self._lock:
            return [block.key for block in self._blocks.values()]

    def corrupt(self, key: BlockKey) -> None:
        """Turn a bit of the block's last slice byte over."""
        with self._lock:
            for block in self._blocks.values():
                if block.key == key:
                    header = unpack_header(memoryview(block.data))
                    end = header.header_bytes + (header.layers - 1) * header.slice_stride + header.slice_bytes
                    block.data[end - 1] ^= 1

    def crashed(self) -> Self:
        """The disk as a daemon finds it that starts after this one lost power: what was synced, and no more."""
        with self._lock:
            found = type(self)(self.capacity_bytes)
            found._specs = dict(self._specs)
            found._blocks = {h: replace(b, data=bytearray(b.data)) for h, b in self._blocks.items() if b.synced}
            found._next = self._next
            return found

    # -- DiskTier ------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks."""
        with self._lock:
            return sum(len(block.data) for block in self._blocks.values())

    @property
    def state(self) -> DiskState:
        """ "degraded" while the switch is on."""
        return DiskState("degraded" if self.degraded else "ready", "switched off" if self.degraded else "")

    def recover(self) -> Iterator[RecoveredBlock]:
        """Every block, oldest first."""
        blocks = list(self._blocks.items())
        for order, (handle, block) in enumerate(blocks):
            yield RecoveredBlock(DiskHandle(handle), block.namespace_id, block.key, block.parent, block.codec, order)
        self._report = RecoveryReport(blocks=len(blocks), bytes=sum(len(b.data) for _, b in blocks))

    @property
    def report(self) -> RecoveryReport:
        """Of the last ``recover``."""
        return self._report

    def namespaces(self) -> Sequence[tuple[NamespaceSpec, NamespacePolicy, str]]:
        """What was put."""
        return list(self._specs.values())

    def put_namespace(self, spec: NamespaceSpec, policy: NamespacePolicy, name: str) -> None:
        """Durable at once."""
        self._fail_if_told()
        self._specs[spec.namespace_id] = (spec, policy, name)

    def write(self, namespace_id: NamespaceId, blocks: Sequence[BlockWrite], *, durable: bool) -> list[DiskHandle]:
        """All or nothing."""
        self.before_write()
        self._fail_if_told()
        if namespace_id not in self._specs:
            raise CorruptBlock("a block was written before its namespace")
        needed = sum(len(block.stored) for block in blocks)
        if self.used_bytes + needed > self.capacity_bytes:
            raise TierFull(f"{needed} bytes do not fit")
        handles = []
        with self._lock:
            self.writes.append(tuple(block.key for block in blocks))
            for block in blocks:
                self._blocks[self._next] = _Stored(
                    namespace_id, block.key, block.parent, block.codec, bytearray(block.stored), durable
                )
                handles.append(DiskHandle(self._next))
                self._next += 1
        return handles

    def read(self, reads: Sequence[BlockRead]) -> list[ReadStatus]:
        """Checked as the real tier does."""
        self.before_read()
        with self._lock:
            self.reads.append(tuple(read.key for read in reads))
            return [self._read(read) for read in reads]

    def _read(self, read: BlockRead) -> ReadStatus:
        block = self._blocks.get(read.handle)
        if block is None or read.namespace_id not in (None, block.namespace_id):
            return ReadStatus.GONE
        if self.degraded or read.key in self.unreadable:
            return ReadStatus.UNAVAILABLE
        layout = BlockLayout.of(self._specs[block.namespace_id][0])
        data = memoryview(block.data)
        try:
            header = unpack_header(data)
            check_header(header, read.key, block.namespace_id, layout)
        except CorruptBlock as error:
            return self._set_aside(read.handle, str(error))
        begin, end = read.layers or (0, header.layers)
        first = header.header_bytes + begin * header.slice_stride
        slices = data[first : header.header_bytes + end * header.slice_stride]
        if first_bad_slice(slices, header, range(begin, end)) is not None:
            return self._set_aside(read.handle, "a slice fails its checksum")
        source = slices if read.layers else data
        read.into[: len(source)] = source
        return ReadStatus.OK

    def _set_aside(self, handle: int, cause: str) -> ReadStatus:
        block = self._blocks.pop(handle)
        self._quarantined.append(QuarantineEntry(f"block-{handle}", len(block.data), block.key, cause))
        return ReadStatus.CORRUPT

    def locate(self, blocks: Sequence[tuple[DiskHandle, BlockName]], units: tuple[int, int]) -> Located | None:
        """There are no files: plans read with ``read``."""
        return None

    def drop(self, handles: Sequence[DiskHandle], names: Sequence[BlockName] | None = None) -> None:
        """Durable at once. Handles are not used again here."""
        with self._lock:
            for handle in handles:
                self._blocks.pop(handle, None)

    def touch(self, handles: Sequence[DiskHandle]) -> None:
        """Each block by itself, and durable at once."""
        with self._lock:
            for handle in handles:
                if handle in self._blocks:
                    self._blocks[handle] = self._blocks.pop(handle)

    def lost(self) -> Sequence[tuple[DiskHandle, BlockName]]:
        """Nothing is lost here."""
        return ()

    def flush(self) -> None:
        """Everything is synced."""
        self._fail_if_told()
        self.flushes += 1
        with self._lock:
            for block in self._blocks.values():
                block.synced = True

    def verify(self, handle: DiskHandle, name: BlockName) -> ReadStatus:
        """A read that is thrown away."""
        block = self._blocks.get(handle)
        into = memoryview(bytearray(len(block.data) if block else 0))
        return self.read([BlockRead(handle, name[1], into, None, name[0])])[0]

    def usage(self) -> DiskUsage:
        """Without a directory."""
        return DiskUsage("memory", self.capacity_bytes, self.used_bytes, 0, self.capacity_bytes - self.used_bytes)

    def close(self) -> None:
        """A clean end syncs."""
        for block in self._blocks.values():
            block.synced = True

    def _fail_if_told(self) -> None:
        if self.degraded:
            raise TierUnavailable("switched off")
        if self.fail_writes is not None:
            raise self.fail_writes("told to fail")


class MemoryDisk(MemoryStorage, Maintained):
    """As SSD does it: the space of dropped blocks stays used until ``reclaim``."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        super().__init__(capacity_bytes)
        self._dropped: list[int] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks, and of dropped ones until they are reclaimed."""
        return super().used_bytes + sum(self._dropped)

    def drop(self, handles: Sequence[DiskHandle], names: Sequence[BlockName] | None = None) -> None:
        """Their space stays used."""
        with self._lock:
            self._dropped += [len(self._blocks[handle].data) for handle in handles if handle in self._blocks]
        super().drop(handles, names)

    @property
    def fragmentation(self) -> float:
        """Nothing lies in segments here."""
        return 0.0

    def reclaim(self, nbytes: int) -> int:
        """All of it at once."""
        with self._lock:
            freed = sum(self._dropped)
            self._dropped.clear()
            return freed

    def compact(self, fragmentation: float, stop: Stop = never) -> CompactReport:
        """There is nothing to move."""
        return CompactReport(bytes_freed=self.reclaim(0))

    def segments(self) -> Sequence[SegmentUsage]:
        """There are none."""
        return ()

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """What failed a check."""
        return list(self._quarantined)

    def empty_quarantine(self) -> None:
        """Forget it."""
        self._quarantined.clear()


if TYPE_CHECKING:

    def _meets(disk: MemoryStorage) -> DiskTier:
        return disk
