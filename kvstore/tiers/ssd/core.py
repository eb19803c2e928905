"""What the verbs of the SSD tier share: the tables, the segments, the ledger, the pools, and the one lock.

``Core.lock`` guards the block table, the catalog, the segments' numbers, the ledger, the header cache and the
counters. It is never held over I/O, a copy or a wait. Order of locks: growth, then core, then committer or pool.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.core.clock import Clock
from kvstore.core.errors import TierUnavailable
from kvstore.core.types import KEY_BYTES, BlockKey, BlockName, NamespaceId
from kvstore.kernels.layout import align_up
from kvstore.tiers.base import DiskHandle
from kvstore.tiers.ssd.catalog import CATALOG_NAME, Space
from kvstore.tiers.ssd.checkpoint import checkpoint_bytes
from kvstore.tiers.ssd.config import PAGE_BYTES, SsdConfig
from kvstore.tiers.ssd.format import HEAD_BYTES_MAX, SEGMENT_HEAD_BYTES, CodedSlices, ExtentShape, segment_name
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.iopool import Gate, IoPool
from kvstore.tiers.ssd.ledger import Ledger
from kvstore.tiers.ssd.port import DiskPort
from kvstore.tiers.ssd.table import BlockTable, Extent

log: Final = logging.getLogger("kvstore.ssd")

ENTRY_BYTES: Final = 330
"""What an entry of the header cache takes besides its tables: most of it, where extents are single small blocks."""
SHARES_MAX: Final = 4096
"""Kinds of extents whose sizes are remembered."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Held:
    """A descriptor of its own on a segment's file, for those who read it natively, and what tells them of its end."""

    fd: int
    version: NDArray[np.uint64]
    holders: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """One open segment file. ``used_bytes`` is where the next extent goes."""

    number: int
    fd: int
    file_bytes: int
    used_bytes: int
    live_bytes: int = 0
    blocks: int = 0
    open: bool = False
    name_synced: bool = True
    users: int = 0
    """I/Os under way; the descriptor stays open while there are any."""
    doomed: bool = False
    held: Held | None = None
    """While plans read from it."""

    @property
    def name(self) -> str:
        """File name."""
        return segment_name(self.number)

    @property
    def loose_bytes(self) -> int:
        """Bytes behind the last extent."""
        return self.file_bytes - self.used_bytes

    @property
    def dead_share(self) -> float:
        """Part of what was put in that died; the head is no loss, and a byte a block is lost in rounding."""
        put = self.used_bytes - SEGMENT_HEAD_BYTES
        return max(0.0, 1 - (self.live_bytes + self.blocks) / put) if put else 1.0


@dataclass(slots=True)
class Call:
    """One system call of bookkeeping, done on a pool thread so that its caller can give up on it."""

    work: Callable[[], object]
    nbytes: int = 0
    result: object = None

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Do it; ``buffer`` and ``gate`` are not used, since nothing of the caller's is touched."""
        del buffer, gate
        self.result = self.work()


@dataclass(frozen=True, slots=True)
class HeadTables:
    """The tables of an extent's head: 32 bytes of key a block, checksums uint32 [blocks, layers]."""

    keys: bytes
    crcs: NDArray[np.uint32]
    coded: CodedSlices | None = None

    @property
    def nbytes(self) -> int:
        """Memory of all, and of the objects and the entry that hold them."""
        return (
            ENTRY_BYTES + len(self.keys) + self.crcs.nbytes + (0 if self.coded is None else self.coded.lengths.nbytes)
        )

    def key(self, position: int) -> BlockKey:
        """Key of one block."""
        return BlockKey(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])


class HeaderCache:
    """Tables of extents used lately, by extent number; bounded in bytes."""

    def __init__(self, nbytes_max: int) -> None:
        self._max = nbytes_max
        self._bytes = 0
        self._entries: OrderedDict[int, HeadTables] = OrderedDict()

    def get(self, number: int) -> HeadTables | None:
        """Tables of an extent, if known."""
        found = self._entries.get(number)
        if found is not None:
            self._entries.move_to_end(number)
        return found

    def put(self, number: int, tables: HeadTables) -> None:
        """Keep an extent's tables, dropping the oldest over the bound."""
        self.drop(number)
        self._entries[number] = tables
        self._bytes += tables.nbytes
        while self._bytes > self._max and self._entries:
            _, old = self._entries.popitem(last=False)
            self._bytes -= old.nbytes

    def drop(self, number: int) -> None:
        """Forget an extent."""
        old = self._entries.pop(number, None)
        if old is not None:
            self._bytes -= old.nbytes


@dataclass(eq=False)
class Core:
    """Shared state; see the module's head for what the lock guards."""

    port: DiskPort
    config: SsdConfig
    clock: Clock
    lock: threading.RLock = field(default_factory=threading.RLock)
    growth: threading.Lock = field(default_factory=threading.Lock)
    table: BlockTable = field(default_factory=BlockTable)
    spaces: list[Space] = field(default_factory=list)
    """By index; it is replaced and never changed. What is not in ``space_index`` is forgotten."""
    space_index: dict[NamespaceId, int] = field(default_factory=dict)
    """In the order in which they were put last."""
    free_spaces: list[int] = field(default_factory=list)
    """Indices of namespaces that were forgotten, to be used again."""
    spaces_used: Counter[int] = field(default_factory=Counter)
    """Indices by writes under way, which may not be in the tables yet."""
    spaces_written: set[NamespaceId] = field(default_factory=set)
    """Namespaces of which a write began since this was cleared."""
    spaces_look: int = 0
    """From so many namespaces on it is worth looking for empty ones."""
    catalog_bytes: int | None = None
    """Bytes of the catalog's files, behind which lines are added; None if they have to be written anew first."""
    segments: dict[int, Segment] = field(default_factory=dict)
    spares: list[Segment] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    counters: Counter[str] = field(default_factory=Counter)
    lost: list[tuple[DiskHandle, BlockName]] = field(default_factory=list)
    """Blocks dropped without being asked to, of which the store does not know yet."""
    saved_bytes: int = 0
    """By coded slices of live blocks."""
    _shares: dict[tuple[int, int, int, int], tuple[int, int]] = field(default_factory=dict)
    free_seen: int | None = None
    """Bytes that nobody had on the filesystem when it was looked at last."""
    touched: bool = False
    """Extents were used since the last checkpoint."""
    next_extent: int = 1
    """Numbers of extents and their ages come from this one counter."""
    next_segment: int = 1
    open_segment: Segment | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.headers = HeaderCache(config.header_cache_bytes)
        self.health = Health(config, self.clock)
        least = config.io_bytes + HEAD_BYTES_MAX
        self.reads = IoPool("ssd-read", config.read_threads, max(config.read_bytes_in_flight, least), self.clock)
        self.writes = IoPool("ssd-write", config.write_threads, max(config.write_bytes_in_flight, least), self.clock)
        self.calls = IoPool("ssd-call", 2, 4 * PAGE_BYTES, self.clock)

    def look_at_room(self) -> None:
        """See how much of the filesystem is free. Raises OSError."""
        self.free_seen = self.attempt(self.port.free_bytes)

    def attempt(self, work: Callable[[], T]) -> T:
        """Do bookkeeping I/O on a pool thread with a deadline; raises what it raises, TimeoutError when it is stuck."""
        task = Call(work)
        self.calls.do(task, self.config.io_deadline_s)
        return task.result  # type: ignore[return-value]

    def call(self, what: str, work: Callable[[], T]) -> T:
        """``attempt`` that tells the health of an OSError, and raises TierUnavailable for it."""
        try:
            return self.attempt(work)
        except OSError as error:
            self.health.write_failed(what, error)
            raise TierUnavailable(f"{what}: {error}") from error

    def shape(self, extent: Extent) -> ExtentShape:
        """The lengths of an extent in the table."""
        return ExtentShape.of(self.spaces[extent.space].layout, extent.codec, extent.blocks, extent.pages)

    def shares(self, extent_row: int) -> tuple[int, int]:
        """Bytes of an extent that one of its blocks stands for, and bytes of disk that its coding saves a block."""
        table = self.table
        kind = (
            table.extent_space[extent_row], table.extent_codec[extent_row], table.extent_blocks[extent_row],
            table.extent_pages[extent_row],
        )  # fmt: skip
        known = self._shares.get(kind)
        if known is None:
            shape = self.shape(table.extent(extent_row))
            share = shape.total_bytes // shape.blocks
            known = share, replace(shape, pages=0).total_bytes // shape.blocks - share
            if len(self._shares) >= SHARES_MAX:
                self._shares.clear()
            self._shares[kind] = known
        return known

    def forget_shares(self) -> None:
        """Indices of namespaces change their meaning."""
        self._shares.clear()

    def known_spaces(self) -> list[Space]:
        """The namespaces that are not forgotten, those that were put last at the end."""
        with self.lock:
            return [self.spaces[index] for index in self.space_index.values()]

    def use_spaces(self, indices: Iterable[int]) -> None:
        """A write of such namespaces begins: their indices stay theirs until ``leave_spaces``. The lock is held."""
        self.spaces_used.update(indices)

    def leave_spaces(self, indices: Iterable[int]) -> None:
        """It ended, and what it wrote is in the tables."""
        with self.lock:
            for index in indices:
                self.spaces_used[index] -= 1
                if not self.spaces_used[index]:
                    del self.spaces_used[index]

    def account(self, extent_row: int, blocks: int) -> None:
        """So many blocks of an extent became live, or dead if negative."""
        share, saved = self.shares(extent_row)
        self.saved_bytes += blocks * saved
        segment = self.segments.get(self.table.extent_segment[extent_row])
        if segment is not None:
            segment.live_bytes += blocks * share
            segment.blocks += blocks

    def drop_row(self, handle: int) -> tuple[int, int]:
        """Forget a live block and its extent if that was the last; returns extent number and position."""
        table = self.table
        position = table.block_position[handle]
        extent_row = table.drop_block(handle)
        number = table.extent_number[extent_row]
        self.account(extent_row, -1)
        self.free_if_empty(extent_row)
        return number, position

    def holds(self, handle: int, key: BlockKey, namespace_id: NamespaceId | None) -> bool:
        """Whether a handle names this block and not one that took its row over (None: of any namespace)."""
        table = self.table
        if not table.alive(handle) or table.key(handle) != key:
            return False
        space = table.extent_space[table.block_extent[handle]]
        return namespace_id is None or self.spaces[space].namespace_id == namespace_id

    def lose_row(self, handle: int) -> tuple[int, int]:
        """``drop_row`` of a block that nobody asked to drop."""
        space = self.table.extent_space[self.table.block_extent[handle]]
        self.lost.append((DiskHandle(handle), (self.spaces[space].namespace_id, self.table.key(handle))))
        self.counters["blocks_lost"] += 1
        return self.drop_row(handle)

    def free_if_empty(self, extent_row: int) -> None:
        """Forget an extent in which nothing lives any more."""
        if self.table.extent_live[extent_row] == 0:
            self.headers.drop(self.table.extent_number[extent_row])
            self.table.free_extent(extent_row)

    def metadata_need(self, blocks: int = 0, extents: int = 0) -> int:
        """Bytes kept free for metadata: two checkpoints of the rows so far and more, two journals, quarantine."""
        table = self.table
        count = table.extents + extents
        rows = checkpoint_bytes(count, table.blocks + blocks, len(self.space_index), count)
        limits = 2 * self.config.journal_limit + self.config.quarantine_limit
        # Two files, and a third while one of them is replaced.
        catalog = 3 * self.ledger.file_bytes(CATALOG_NAME)
        return 2 * align_up(rows, PAGE_BYTES) + limits + catalog + 16 * PAGE_BYTES

    def room_bytes(self, blocks: int = 0, extents: int = 0) -> int:
        """Bytes that segments may still grow by within the cap; spares are there to be used."""
        return self.slack_bytes(blocks, extents) + self.spare_bytes()

    def slack_bytes(self, blocks: int = 0, extents: int = 0) -> int:
        """``room_bytes`` beside the spares; below 0 some of them have to go."""
        metadata = max(self.metadata_need(blocks, extents), self.ledger.metadata_bytes)
        return self.config.capacity_bytes - metadata - self.ledger.segments_bytes

    def spare_bytes(self) -> int:
        """Bytes of spares on disk."""
        return sum(self.ledger.segment_bytes.get(segment.number, 0) for segment in self.spares)

    def loose_bytes(self) -> int:
        """Bytes behind the last extents of all segments: closed and cut to size, they are room for another."""
        return sum(segment.loose_bytes for segment in self.segments.values())

    def forget_all(self) -> None:
        """Be as if there were nothing on disk, of which too little is known; descriptors stay open until the end."""
        with self.lock:
            self.table, self.ledger, self.saved_bytes = BlockTable(), Ledger(), 0
            self.spaces, self.space_index, self.open_segment = [], {}, None
            self.free_spaces = []

    def hold(self, segment: Segment) -> Held:
        """The segment's descriptor for native readers, which stays open until ``let_go``. The lock is held."""
        if segment.held is None:
            segment.held = Held(os.dup(segment.fd), np.zeros(1, np.uint64))
        segment.held.holders += 1
        return segment.held

    def let_go(self, segment: Segment, held: Held) -> None:
        """Undo one ``hold``."""
        with self.lock:
            held.holders -= 1
            if held.holders:
                return
            if segment.held is held:
                segment.held = None
        os.close(held.fd)

    def moved(self, segment: Segment) -> None:
        """Nothing lives in a segment any more, and its file may be used again. The lock is held."""
        if segment.held is not None:
            segment.held.version += np.uint64(1)
            segment.held = None

    def use(self, segment: Segment) -> None:
        """An I/O on a segment begins."""
        segment.users += 1

    def leave(self, segment: Segment) -> None:
        """An I/O on a segment ended; closes a doomed one after its last."""
        with self.lock:
            segment.users -= 1
            close = segment.doomed and segment.users == 0
        if close:
            self.port.close(segment.fd)
