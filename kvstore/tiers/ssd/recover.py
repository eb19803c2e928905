"""Recovery: catalog, checkpoint, journals, then what the segments really hold. One thread; nothing else runs.

In normal mode damage is set aside and counted; in strict mode damage that a crash does not explain (anything but
the torn end of the last journal and bytes that no record names) is refused with TierUnavailable.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.core.errors import CorruptBlock
from kvstore.tiers.ssd.cap import forget_over_cap
from kvstore.tiers.ssd.catalog import CATALOG_COPY, CATALOG_NAME, unpack_catalog
from kvstore.tiers.ssd.checkpoint import unpack_checkpoint
from kvstore.tiers.ssd.commit import Committer, Journal, create_journal
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.files import read_file, remove_file
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.format import LOCK_NAME, file_number, segment_name
from kvstore.tiers.ssd.journal import SECTOR_BYTES, Record, check_file_head, read_frame
from kvstore.tiers.ssd.quarantine import Quarantine
from kvstore.tiers.ssd.replay import Replay, drop_extents
from kvstore.tiers.ssd.salvage import find_extents
from kvstore.tiers.ssd.spaces import CATALOG_FILES, catalog_bytes, forget_empty, read_catalog, write_catalog
from kvstore.tiers.ssd.survey import Survey

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


def recover_tables(core: Core, quarantine: Quarantine) -> tuple[Findings, Journal]:
    """Fill the tables; returns what was found on the way, and a new journal to go on with.

    What it needed meanwhile is gone when it returns, so that the store's index can take its place in memory.
    """
    recovery = Recovery(core, quarantine)
    return recovery.findings, recovery.run()


class Recovery:
    """The steps, in the order of ``run``."""

    def __init__(self, core: Core, quarantine: Quarantine) -> None:
        self._core = core
        self._quarantine = quarantine
        self.findings = Findings(core.config.recovery == "strict")
        self._replay = Replay(core, self.findings)
        self._damaged_catalog: dict[str, bytes] = {}
        """The catalog's files, where lines of them are damaged."""

    def run(self) -> Journal:
        """Fill the tables, and return a new journal to go on with."""
        names = self._list_files()
        self._load_catalog(names)
        generation = self._load_checkpoint(names)
        last = self._replay_journals(names, generation)
        if self.findings.salvage:
            self._salvage(names)
        self._replay.finish()
        Survey(self._core, self.findings, self._quarantine).run(names)
        # Before the cap is looked at: what lines of empty namespaces take need not be taken from blocks.
        self._write_catalog(forget_empty(self._core))
        forget_over_cap(self._core, self.findings)
        journal = self._create_journal(last + 1)
        journal.older = [number for number in numbers_of(names, "journal") if number >= generation]
        journal.older_bytes = sum(self._size(f"journal-{number:08d}") for number in journal.older)
        return journal

    def _create_journal(self, number: int) -> Journal:
        """A new journal. On a disk that others have filled the emptiest segment goes for it: the rest of the tier, and
        the other tiers, are worth more than its blocks."""
        core = self._core
        while True:
            try:
                return create_journal(core, number)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if self.findings.over_cap:
                    remove_over_cap(core, self.findings)
                    continue
                if not core.segments:
                    raise
                segment = min(core.segments.values(), key=lambda one: one.live_bytes)
                log.error("recovery: %s; %s is given up for it", error, segment.name)
                rows = core.table.extents_of_segment(segment.number)
                self._core.counters["segments_given_up"] += 1
                drop_extents(core, rows, self.findings, f"blocks of {segment.name}, given up for room")
                if core.open_segment is segment:
                    core.open_segment = None
                del core.segments[segment.number]
                core.port.close(segment.fd)
                remove_file(core, segment.name)
                core.ledger.remove_segment(segment.number)

    def _list_files(self) -> list[str]:
        core = self._core
        names = [name for name in core.port.listdir("") if name not in ("quarantine", LOCK_NAME)]
        for name in names:
            if name.endswith(".tmp"):
                remove_file(core, name)
        core.ledger.set_file("", core.port.stat("").allocated)
        core.ledger.set_file(LOCK_NAME, core.port.stat(LOCK_NAME).allocated)
        kept = [name for name in names if not name.endswith(".tmp")]
        for name in kept:
            if file_number(name, "segment") is None:
                core.ledger.set_file(name, core.port.stat(name).allocated)
        return kept

    def _load_catalog(self, names: list[str]) -> None:
        core = self._core
        if CATALOG_NAME not in names and CATALOG_COPY not in names:
            return
        try:
            files = read_catalog(core, names)
            found = unpack_catalog(*files)
            core.spaces, core.catalog_bytes = found.spaces, catalog_bytes(core, names) if found.lines else None
            if found.damage:
                self._damaged_catalog = {name: data for name, data in zip(CATALOG_FILES, files, strict=True) if data}
                self.findings.damaged(f"{found.damage} lines of {CATALOG_NAME} and its copy are damaged")
        except CorruptBlock as error:
            self.findings.damaged(error.message)
            for name in {CATALOG_NAME, CATALOG_COPY} & set(names):
                self._quarantine.take_file(name, error.message)
        core.space_index = {space.namespace_id: space.index for space in core.spaces}

    def _write_catalog(self, forgotten: int) -> None:
        """Write what is left of the lines anew, so that neither damage nor empty namespaces are met again. On a full
        disk the next namespace that is put does it."""
        core = self._core
        if not forgotten and not self._damaged_catalog:
            return
        for name, data in self._damaged_catalog.items():
            self._quarantine.keep(f"damaged-{name}", data, "lines of it are damaged")
        try:
            write_catalog(core, core.known_spaces())
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            for name in CATALOG_FILES:
                remove_file(core, f"{name}.tmp")
            log.warning("recovery: %s stays as it is for now: %s", CATALOG_NAME, error)

    def _load_checkpoint(self, names: list[str]) -> int:
        for number in reversed(numbers_of(names, "checkpoint")):
            name = f"checkpoint-{number:08d}"
            try:
                found = unpack_checkpoint(memoryview(read_file(self._core.port, name)), number)
            except CorruptBlock as error:
                self.findings.damaged(error.message)
                self._quarantine.take_file(name, error.message)
                self.findings.salvage = True
                continue
            self._replay.load(found)
            return number
        return 0

    def _replay_journals(self, names: list[str], generation: int) -> int:
        numbers = numbers_of(names, "journal")
        for number in numbers:
            if number < generation:
                remove_file(self._core, f"journal-{number:08d}")
        current = [number for number in numbers if number >= generation]
        segments = bool(numbers_of(names, "segment"))
        if not generation and not self.findings.salvage and (current[0] > 1 if current else segments):
            self.findings.damaged("the checkpoint is missing")
            self.findings.salvage = True
        for number in current:
            self._replay_one(number, last=number == current[-1])
        return max([generation, *current])

    def _replay_one(self, generation: int, *, last: bool) -> None:
        name = f"journal-{generation:08d}"
        data = memoryview(read_file(self._core.port, name))
        try:
            check_file_head(data, generation)
        except CorruptBlock as error:
            # A crash may tear the head of a journal that holds no frame yet.
            if len(data) > SECTOR_BYTES:
                self.findings.damaged(error.message)
            self.findings.cut_bytes += len(data)
            self._quarantine.take_file(name, error.message)
            return
        end, expected = scan_frames(data, generation, self._replay.apply)
        if end == len(data):
            return
        self.findings.cut_bytes += len(data) - end
        tail = bytes(data[end:])
        later = count_later_frames(data, end, generation, expected)
        if later:
            self.findings.damaged(f"{name} is damaged at {end}, with {later} good frames behind")
        elif not last and any(tail):
            log.warning("%s ends in %d bytes that are no frame; the next journal replaced it", name, len(tail))
        self._quarantine.keep(f"cut-{name}", tail, "the torn end of a journal")
        if later:
            self._replay_rest(data, end, generation)
        fd = self._core.port.open(name)
        try:
            if not later:
                self._core.port.truncate(fd, end)
                self._core.port.fdatasync(fd)
            self._core.ledger.set_file(name, self._core.port.fstat(fd).allocated)
        finally:
            self._core.port.close(fd)

    def _replay_rest(self, data: memoryview, begin: int, generation: int) -> None:
        """Frames behind a damaged one still count; what the damaged one said is lost."""
        at = begin + SECTOR_BYTES
        while at < len(data):
            frame = read_frame(data, at, generation)
            if frame is None:
                at += SECTOR_BYTES
                continue
            for record in frame.records:
                self._replay.apply(record)
            at = frame.end

    def _salvage(self, names: list[str]) -> None:
        core, found = self._core, []
        for number in numbers_of(names, "segment"):
            fd = core.port.open(segment_name(number), direct=True)
            try:
                found += list(find_extents(core, number, fd, core.port.fstat(fd).size))
            finally:
                core.port.close(fd)
        log.warning("recovery: %d blocks were salvaged from the segments", self._replay.adopt(found))

    def _size(self, name: str) -> int:
        return self._core.port.stat(name).size if name in self._core.ledger.names() else 0


def start_journal(core: Core, committer: Committer, journal: Journal, findings: Findings) -> None:
    """Go on in the new journal, behind a checkpoint where the old files say what is no longer so."""
    try:
        committer.start(journal, checkpoint=bool(findings.damage) or findings.shrunk)
    except OSError as error:
        if error.errno not in NO_ROOM or not findings.over_cap:
            raise
        remove_over_cap(core, findings)
        committer.start(committer.journal or journal, checkpoint=True)
    remove_over_cap(core, findings)


def remove_over_cap(core: Core, findings: Findings) -> None:
    """Unlink the segments that a lowered cap has no room for."""
    while findings.over_cap:
        segment = findings.over_cap.pop()
        core.port.close(segment.fd)
        remove_file(core, segment.name)
        core.ledger.remove_segment(segment.number)


def scan_frames(data: memoryview, generation: int, apply: Callable[[Record], None]) -> tuple[int, int]:
    """Apply the valid frames from the head on; returns where they end and the next frame number."""
    at, expected = SECTOR_BYTES, 0
    while True:
        frame = read_frame(data, at, generation)
        if frame is None or frame.number != expected:
            return min(at, len(data)), expected
        for record in frame.records:
            apply(record)
        at, expected = frame.end, expected + 1


def count_later_frames(data: memoryview, begin: int, generation: int, expected: int) -> int:
    """Valid frames behind a bad one: a crash leaves none, since each frame is synced before the next."""
    count, at = 0, begin + SECTOR_BYTES
    while at < len(data):
        frame = read_frame(data, at, generation)
        if frame is not None and frame.number > expected:
            count += 1
            at = frame.end
        else:
            at += SECTOR_BYTES
    return count


def numbers_of(names: Sequence[str], kind: str) -> list[int]:
    """Numbers of the files of a kind ("journal", "segment"), ascending."""
    return sorted(number for name in names if (number := file_number(name, kind)) is not None)
