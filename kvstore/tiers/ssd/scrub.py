"""Checks a directory at rest: every record, every head, every slice. Changes nothing but the pid in ``LOCK``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import CorruptBlock, TierUnavailable
from kvstore.core.types import BlockKey
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus
from kvstore.tiers.ssd.catalog import CATALOG_COPY, CATALOG_NAME, Catalog, unpack_catalog
from kvstore.tiers.ssd.checkpoint import unpack_checkpoint
from kvstore.tiers.ssd.config import SsdConfig
from kvstore.tiers.ssd.core import Core, Segment
from kvstore.tiers.ssd.files import read_file
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.format import LOCK_NAME, SEGMENT_HEAD_BYTES, check_segment_head, segment_name
from kvstore.tiers.ssd.journal import SECTOR_BYTES, check_file_head
from kvstore.tiers.ssd.port import DiskPort, read_full
from kvstore.tiers.ssd.reader import Reader
from kvstore.tiers.ssd.recover import numbers_of, scan_frames
from kvstore.tiers.ssd.replay import Replay
from kvstore.tiers.ssd.spaces import read_catalog


@dataclass(slots=True)
class ScrubReport:
    """What a check found; ``whole`` is its sum. Keys are hex."""

    directory: str
    blocks: int = 0
    bytes: int = 0
    good: int = 0
    corrupt: list[dict[str, str]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    torn_tail_bytes: int = 0
    orphans: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    du_bytes: int = 0

    @property
    def whole(self) -> bool:
        """Whether every block is good and no file is damaged; orphans, torn tails and temporary files are no damage."""
        return not self.corrupt and not self.damage


class Scrub:
    """One check of one directory, which nobody may hold."""

    def __init__(self, port: DiskPort) -> None:
        self._port = port
        self._core = Core(port, SsdConfig(capacity_bytes=1 << 40), MonotonicClock())
        self._findings = Findings(strict=False)
        self._replay = Replay(self._core, self._findings)
        self._report = ScrubReport(port.directory)

    def run(self) -> ScrubReport:
        """Check; raises TierUnavailable if there is no tier, another process holds it, or its version is not known."""
        with self._held() as names:
            self._list(names)
            self._load(names)
            self._open_segments(names)
            self._check_blocks()
            self._report.damage += self._findings.damage
            return self._report

    def names(self) -> tuple[frozenset[BlockKey], tuple[str, ...]]:
        """Keys that the records name, and what of the records is damaged; raises as ``run``. Segments are not read."""
        with self._held() as names:
            self._load(names)
            table = self._core.table
            keys = frozenset(table.key(row) for row in range(len(table.block_extent)) if table.alive(row))
            return keys, (*self._report.damage, *self._findings.damage)

    @contextmanager
    def _held(self) -> Iterator[list[str]]:
        """The names in the directory, which is held meanwhile."""
        names = self._port.listdir("")
        if not any(name.startswith(("segment-", "journal-", "checkpoint-")) for name in names):
            raise TierUnavailable(f"{self._port.directory} holds no SSD tier")
        held = self._port.lock(LOCK_NAME)
        try:
            yield names
        finally:
            for segment in self._core.segments.values():
                self._port.close(segment.fd)
            for pool in (self._core.reads, self._core.writes, self._core.calls):
                pool.close()
            self._port.close(held)

    def _list(self, names: Sequence[str]) -> None:
        report, port = self._report, self._port
        report.temporary = [name for name in names if name.endswith(".tmp")]
        kept = port.listdir("quarantine") if "quarantine" in names else []
        report.quarantined = [f"quarantine/{name}" for name in kept]
        report.du_bytes = sum(port.stat(name).allocated for name in ("", *names, *report.quarantined))

    def _load(self, names: Sequence[str]) -> None:
        core, generation = self._core, 0
        try:
            known = CATALOG_NAME in names or CATALOG_COPY in names
            found = unpack_catalog(*read_catalog(core, names)) if known else Catalog([])
            core.spaces = found.spaces
            if found.damage:
                self._report.damage.append(f"{found.damage} lines of {CATALOG_NAME} and its copy are damaged")
        except CorruptBlock as error:
            self._report.damage.append(error.message)
        core.space_index = {space.namespace_id: space.index for space in core.spaces}
        for number in reversed(numbers_of(names, "checkpoint")):
            try:
                data = read_file(self._port, f"checkpoint-{number:08d}")
                self._replay.load(unpack_checkpoint(memoryview(data), number))
                generation = number
                break
            except CorruptBlock as error:
                self._report.damage.append(error.message)
        for number in numbers_of(names, "journal"):
            if number >= generation:
                self._load_journal(number)
        self._replay.finish()

    def _load_journal(self, number: int) -> None:
        name = f"journal-{number:08d}"
        data = memoryview(read_file(self._port, name))
        try:
            check_file_head(data, number)
        except CorruptBlock as error:
            # A crash may tear the head of a journal that holds no frame yet.
            if len(data) > SECTOR_BYTES:
                self._report.damage.append(error.message)
            self._report.torn_tail_bytes += len(data)
            return
        end, _ = scan_frames(data, number, self._replay.apply)
        self._report.torn_tail_bytes += len(data) - end

    def _open_segments(self, names: Sequence[str]) -> None:
        core, port = self._core, self._port
        named = set(core.table.extent_segment)
        for number in numbers_of(names, "segment"):
            if number not in named:
                self._report.orphans.append(segment_name(number))
                continue
            fd = port.open(segment_name(number), direct=True)
            size = port.fstat(fd).size
            core.segments[number] = Segment(number, fd, size, size)
            head = memoryview(bytearray(SEGMENT_HEAD_BYTES))
            plain = port.open(segment_name(number))
            try:
                check_segment_head(head[: read_full(port, plain, head, 0)], number)
            except CorruptBlock as error:
                self._report.damage.append(error.message)
            finally:
                port.close(plain)

    def _check_blocks(self) -> None:
        core, report = self._core, self._report
        reader = Reader(core)
        for handle in range(len(core.table.block_extent)):
            if not core.table.alive(handle):
                continue
            key = core.table.key(handle)
            extent = core.table.extent(core.table.block_extent[handle])
            report.blocks += 1
            if extent.segment not in core.segments:
                report.corrupt.append({"key": key.hex(), "cause": f"{segment_name(extent.segment)} is missing"})
                continue
            nbytes = core.spaces[extent.space].layout.of_codec(extent.codec)[2]
            into = memoryview(bytearray(nbytes))
            (status,), causes = reader.read([BlockRead(DiskHandle(handle), key, into)])
            if status is ReadStatus.OK:
                report.good += 1
                report.bytes += nbytes
            else:
                report.corrupt.append({"key": key.hex(), "cause": causes.get(0, status.value)})


def check_directory(port: DiskPort) -> ScrubReport:
    """Check the directory of a port; see ``Scrub.run``."""
    return Scrub(port).run()


def named_blocks(port: DiskPort) -> tuple[frozenset[BlockKey], tuple[str, ...]]:
    """What the records of a directory at rest name, and their damage; see ``Scrub.names``."""
    return Scrub(port).names()
