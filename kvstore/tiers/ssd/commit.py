"""Group commit: one thread that syncs data, then writes and syncs one frame for everybody who waits.

While it syncs, others queue: so 64 concurrent committers share two or three syncs. It also writes checkpoints,
since only it knows where the journal stands. A failed sync fails what it would have covered, and is never tried
again on the same file: after an error the kernel may report the next sync of lost pages as good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd.checkpoint import checkpoint_name, pack_checkpoint, snapshot
from kvstore.tiers.ssd.core import Core, Segment, log
from kvstore.tiers.ssd.files import remove_file, write_file
from kvstore.tiers.ssd.format import file_number
from kvstore.tiers.ssd.journal import SECTOR_BYTES, journal_name, pack_file_head, pack_frame
from kvstore.tiers.ssd.port import write_full

FRAME_RECORDS_MAX: Final = 4096
_IDLE_S: Final = 3600.0


@dataclass(slots=True, eq=False)
class Pending:
    """Records that wait for a frame; ``apply`` is told what became of them, on the committer's thread."""

    records: bytes
    segments: tuple[Segment, ...]
    apply: Callable[[bool], None]
    tells_losses: bool = False
    done: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class Journal:
    """The journal being written. ``sealed_bytes`` are those of older ones that no checkpoint covers yet."""

    generation: int
    fd: int
    size: int = SECTOR_BYTES
    frames: int = 0
    broken: bool = False
    older: list[int] = field(default_factory=list)
    older_bytes: int = 0


class CommitWatcher(Protocol):
    """Who wants to know when drops became durable, without a commit of its own. Called on the committer's thread."""

    def before_commit(self) -> list[Segment]:
        """Segments that are free once everything queued so far is durable. Asked before the queue is taken."""

    def after_commit(self, dead: list[Segment]) -> None:
        """It is."""


class Committer:
    """The thread, its queue, and the journal. The condition's lock guards the queue and every Pending's outcome."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._condition = threading.Condition()
        self._queue: list[Pending] = []
        self._wanted = False
        self._closing = False
        self.journal: Journal | None = None
        self.last_error: BaseException | None = None
        self.watcher: CommitWatcher | None = None
        self._thread = threading.Thread(target=self._work, name="ssd-commit", daemon=True)

    def start(self, journal: Journal, *, checkpoint: bool) -> None:
        """Begin, once recovery has made a journal; with ``checkpoint`` what recovery found is written first."""
        self.journal = journal
        if checkpoint:
            self.write_checkpoint()
        self._thread.start()

    def submit(
        self, records: bytes, segments: tuple[Segment, ...] = (), apply: Callable[[bool], None] = lambda _: None
    ) -> Pending:
        """Queue records for the next frame; ``segments`` hold the data that they name, and are synced before."""
        pending = Pending(records, segments, apply)
        with self._condition:
            self._queue.append(pending)
            if len(self._queue) == 1 or len(self._queue) >= FRAME_RECORDS_MAX:
                self._condition.notify_all()
        return pending

    def wait(self, pending: Pending) -> None:
        """Return when it is durable; raises TierUnavailable when that failed or took too long."""
        core = self._core
        end = core.clock.now() + core.config.io_deadline_s
        with self._condition:
            self._wanted = True
            self._condition.notify_all()
            while not pending.done:
                left = end - core.clock.now()
                if left <= 0:
                    break
                self._condition.wait(left)
            done, error = pending.done, pending.error
        if not done:
            late = TimeoutError(f"no sync for {core.config.io_deadline_s} s")
            core.health.write_failed("commit", late)
            raise TierUnavailable(f"commit: {late}") from late
        if error is not None:
            raise TierUnavailable(f"commit: {error}") from error

    def flush(self) -> None:
        """Return when everything queued so far is durable; raises TierUnavailable, too, if some of it was lost."""
        pending = self.submit(b"")
        pending.tells_losses = True
        self.wait(pending)

    def settle(self) -> None:
        """Return when the journal takes frames, and everything queued so far is durable or lost."""
        self.wait(self.submit(b""))

    def check_journal(self) -> None:
        """Notice that the journal was removed from outside; the next commit then begins with a checkpoint."""
        journal = self.journal
        if journal is None:
            return
        try:
            journal.broken |= self._core.port.fstat(journal.fd).links == 0
        except OSError:
            # A checkpoint closes the journal that it replaces; the fresh one is looked at next time.
            if self.journal is journal:
                raise

    def close(self) -> None:
        """Commit what is queued, write a checkpoint if the disk allows it, and end the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._core.config.io_deadline_s)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._await_work()
            dead = [] if self.watcher is None else self.watcher.before_commit()
            with self._condition:
                batch, self._queue = self._queue, []
                self._wanted = False
                closing = self._closing
            if batch and self._commit_and_tell(batch) and self.watcher is not None:
                self.watcher.after_commit(dead)
            if closing and not self._queue:
                self._final_checkpoint()
                return

    def _commit_and_tell(self, batch: list[Pending]) -> bool:
        """Commit a batch and tell everybody; True if all of it is durable."""
        try:
            errors = self._commit(batch)
        except Exception as bug:  # noqa: BLE001 - a dead committer would leave everybody waiting: they are told
            log.exception("a group commit failed")
            self._core.health.write_failed("commit", bug)
            errors = [bug] * len(batch)
        durable = not any(errors)
        self._report_losses(batch, errors)
        self._settle(batch, errors)
        return durable

    def _await_work(self) -> None:
        interval = self._core.config.commit_interval_s
        while not (self._closing or (self._wanted and self._queue) or len(self._queue) >= FRAME_RECORDS_MAX):
            if self._queue and interval is not None:
                if not self._condition.wait(interval):
                    return
            else:
                self._condition.wait(_IDLE_S)

    def _settle(self, batch: list[Pending], errors: list[BaseException | None]) -> None:
        for pending, error in zip(batch, errors, strict=True):
            pending.error = error
            try:
                pending.apply(error is None)
            except Exception as bug:  # noqa: BLE001 - the thread must live on; the caller is told
                log.exception("a commit could not be applied")
                pending.error = bug
        with self._condition:
            for pending in batch:
                pending.done = True
            self._condition.notify_all()
        journal = self.journal
        if journal is not None and journal.size + journal.older_bytes > self._core.config.journal_limit:
            self._try_checkpoint()

    def _commit(self, batch: list[Pending]) -> list[BaseException | None]:
        errors: list[BaseException | None] = [None] * len(batch)
        try:
            if self.journal is None or self.journal.broken:
                self.write_checkpoint()
        except OSError as error:
            self._core.health.write_failed("checkpoint", error)
            return [error] * len(batch)
        failed: dict[Segment, OSError] = {}
        for segment in dict.fromkeys(segment for pending in batch for segment in pending.segments):
            try:
                self._sync_segment(segment)
            except OSError as error:
                failed[segment] = error
                self._core.health.write_failed(f"sync of {segment.name}", error)
        for index, pending in enumerate(batch):
            errors[index] = next((failed[segment] for segment in pending.segments if segment in failed), None)
        records = [p.records for p, error in zip(batch, errors, strict=True) if error is None and p.records]
        if records:
            try:
                self._append(records)
            except OSError as error:
                self._core.health.write_failed("journal", error)
                return [error] * len(batch)
        return errors

    def _report_losses(self, batch: list[Pending], errors: list[BaseException | None]) -> None:
        """A flush fails when anything failed since the last one."""
        lost = [error for pending, error in zip(batch, errors, strict=True) if pending.records and error is not None]
        failed = lost[0] if lost else self.last_error
        flushes = [index for index, pending in enumerate(batch) if pending.tells_losses]
        for index in flushes:
            errors[index] = errors[index] or failed
        self.last_error = None if flushes else failed

    def _sync_segment(self, segment: Segment) -> None:
        core = self._core
        try:
            core.port.fdatasync(segment.fd)
            if not segment.name_synced:
                with core.lock:
                    new = [one for one in core.segments.values() if not one.name_synced]
                core.port.sync_directory("")
                for one in [segment, *new]:
                    one.name_synced = True
            stat = core.port.fstat(segment.fd)
            if stat.links == 0:
                raise OSError(f"{segment.name} was removed from outside")
        except OSError:
            with core.lock:
                # Nothing more goes into a segment whose sync failed.
                segment.open = False
                if core.open_segment is segment:
                    core.open_segment = None
            raise
        with core.lock:
            if not segment.doomed:
                core.ledger.set_segment(segment.number, stat.allocated)
        core.counters["syncs"] += 1

    def _append(self, records: list[bytes]) -> None:
        journal = self.journal
        if journal is None:
            raise OSError("there is no journal")
        core = self._core
        frame = pack_frame(journal.generation, journal.frames, records)
        try:
            write_full(core.port, journal.fd, memoryview(frame), journal.size)
            core.port.fdatasync(journal.fd)
            stat = core.port.fstat(journal.fd)
            if stat.links == 0:
                raise OSError(f"{journal_name(journal.generation)} was removed from outside")
        except OSError:
            journal.broken = True
            raise
        journal.size += len(frame)
        journal.frames += 1
        with core.lock:
            core.ledger.set_file(journal_name(journal.generation), stat.allocated)
            core.counters["syncs"] += 1
            core.counters["frames"] += 1

    def _try_checkpoint(self) -> None:
        try:
            self.write_checkpoint()
        except Exception as error:  # noqa: BLE001 - the journal goes on without; a dead committer would not
            log.warning("the checkpoint failed: %s", error)
            self._core.health.write_failed("checkpoint", error)

    def _final_checkpoint(self) -> None:
        journal = self.journal
        if journal is None:
            return
        if journal.broken or journal.frames or journal.older or self._core.touched:
            self._try_checkpoint()
        journal, self.journal = self.journal, None
        if journal is not None:
            self._core.port.close(journal.fd)

    def write_checkpoint(self) -> None:
        """Start a new journal, write the committed rows beside it, and remove what both replace."""
        core, old = self._core, self.journal
        generation = 1 if old is None else old.generation + 1
        fresh = create_journal(core, generation)
        if old is not None:
            fresh.older = [*old.older, old.generation]
            fresh.older_bytes = old.older_bytes + old.size
        self.journal = fresh
        if old is not None:
            core.port.close(old.fd)
        # Until the checkpoint is in place the new journal cannot follow a broken one: its frames would be lost
        # with the hole before them. So it stays broken until then.
        fresh.broken = old is None or old.broken
        with core.lock:
            spaces = core.spaces
            head = (generation, core.next_extent, core.next_segment)
            table = core.table.copy()
            core.touched = False
        found = snapshot(table, spaces, head)
        write_file(core, checkpoint_name(generation), pack_checkpoint(found))
        fresh.broken = False
        self._remove_older(fresh)

    def _remove_older(self, journal: Journal) -> None:
        core = self._core
        with core.lock:
            names = [name for name in core.ledger.names() if is_older(name, journal.generation)]
        for name in names:
            remove_file(core, name)
        journal.older, journal.older_bytes = [], 0


def is_older(name: str, generation: int) -> bool:
    """Whether a name is a journal or checkpoint before this generation."""
    number = file_number(name, name.partition("-")[0])
    return name.startswith(("journal-", "checkpoint-")) and number is not None and number < generation


def create_journal(core: Core, generation: int) -> Journal:
    """Make a journal file and its name durable."""
    name = journal_name(generation)
    # A name left by an attempt that failed half-way holds no frame.
    remove_file(core, name)
    fd = core.port.open(name, create=True)
    write_full(core.port, fd, memoryview(pack_file_head(generation)), 0)
    core.port.fdatasync(fd)
    core.port.sync_directory("")
    with core.lock:
        core.ledger.set_file(name, core.port.fstat(fd).allocated)
    return Journal(generation, fd)
