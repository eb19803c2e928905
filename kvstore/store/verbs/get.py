"""Blocks are found and made readable: match, fetch, prefetch, wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.cache import FetchResult, MatchResult
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import (
    BlockKey,
    Busy,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    SessionId,
    Target,
    Tier,
    WritePolicy,
)  # fmt: skip
from kvstore.store.columns.index import NONE
from kvstore.store.moves.loading import Load, Loading
from kvstore.store.moves.queues import Queues
from kvstore.store.tables import validate
from kvstore.store.tables.asked import count_found, count_match, count_refused
from kvstore.store.tables.book import Book
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Job, Owner
from kvstore.store.tables.state import State
from kvstore.store.tables.tenancy import Tenancy
from kvstore.store.verbs.pinning import pin_found

JobDone = Callable[[SessionId, JobId, FetchResult], None]
"""Called without the lock, from a mover's thread, at the end of a job that nobody waits for. Must not block."""


_TARGETS: Final = frozenset(Target)

SECTION_KEYS: Final = 256
"""Keys that one locked section looks up and pins."""


class Get:
    """The verbs that read."""

    def __init__(self, state: State, tenancy: Tenancy, loading: Loading, queues: Queues) -> None:
        self._state = state
        self._tenancy = tenancy
        self._loading = loading
        self._queues = queues
        self.on_job_done: JobDone | None = None

    def match(self, owner: Owner, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache.match``."""
        validate.check_keys(keys)
        state = self._state
        with state.lock:
            book, namespace = state.unproven, owner.namespace(namespace_id)
            found = book.index.match(namespace.number, keys, state.readable)
            if state.recording.on:
                state.recording.add(namespace, keys, len(found))
                state.tell_readers(book)
            if len(found) == len(keys):
                book.counters["match_found"] += len(found)
                return MatchResult(len(found), tuple(found))
            reason = self.why_missing(book, keys[len(found)], namespace)
            count_match(book.counters, len(keys), len(found), reason)
            near = state.namespaces.near(namespace.spec, owner.namespaces) if not found else ()
        return MatchResult(len(found), tuple(found), reason, near)

    def count_mapped(self, keys: int) -> None:
        """See ``Session.count_mapped``."""
        with self._state.locked() as book:
            book.counters["match_found"] += keys

    def why_missing(self, book: Book, key: BlockKey, namespace: Namespace) -> Reason:
        """Why a key is a miss."""
        if book.resident(key, namespace) != NONE:
            return Reason.TIER_UNAVAILABLE
        return self._state.why_absent(book, (namespace.namespace_id, key))

    def fetch(
        self,
        owner: Owner,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        lease_id: LeaseId,
        layers: tuple[int, int] | None,
    ) -> tuple[FetchResult, Job | None]:
        """See ``Cache.fetch``; does not wait. The job, if one was made."""
        validate.check_keys(keys)
        with self._state.locked() as book:
            lease = self._tenancy.lease(book, owner, lease_id)
            namespace = owner.namespace(namespace_id)
            every = namespace.layout.layers
            chosen = (0, every) if layers is None else validate.check_layers(layers, every)
            if target is not Target.IN_PLACE:
                self._check_target(target, owner)
            load = Load(owner, namespace, tuple(keys), target, lease, chosen)
            if len(keys) <= SECTION_KEYS:
                self._pin(book, load, None)
                return self._move(book, load)
        return self._submit_in_sections(load, lambda book: self._tenancy.lease(book, owner, lease_id))

    def prefetch(self, owner: Owner, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """See ``Cache.prefetch``."""
        validate.check_keys(keys)
        validate.check_tier(tier, [t for t in (Tier.DEVICE, Tier.HOST) if t in self._state.arenas])
        with self._state.locked() as book:
            namespace = owner.namespace(namespace_id)
            target = Target.DEVICE if tier is Tier.DEVICE else Target.HOST
            load = Load(owner, namespace, tuple(keys), target, None, (0, namespace.layout.layers))
            if len(keys) <= SECTION_KEYS:
                self._pin(book, load, None)
                result, job = self._move(book, load)
                if job is not None:
                    job.announce = True
                return result
        return self._submit_in_sections(load, lambda _: owner.require_open(), announce=True)[0]

    def _check_target(self, target: Target, owner: Owner) -> None:
        if target is Target.DEVICE and Tier.DEVICE not in self._state.arenas:
            raise InvalidArgument("target", "DEVICE", "HOST, IN_PLACE or BUFFER: this store has no DEVICE tier")
        if target is Target.BUFFER and owner.buffer is None:
            raise InvalidArgument("target", "BUFFER", "another target, since this session was opened without a buffer")
        if target not in _TARGETS:
            raise InvalidArgument("target", target, "one of " + ", ".join(t.name for t in Target))

    def _submit_in_sections(
        self, load: Load, require: Callable[[Book], object], *, announce: bool = False
    ) -> tuple[FetchResult, Job | None]:
        """``_pin`` and ``_move`` in sections between which others come; ``require`` raises once its rights ended."""
        state = self._state
        try:
            for begin in range(0, len(load.keys), SECTION_KEYS):
                with state.locked() as book:
                    require(book)
                    self._pin(book, load, (begin, min(begin + SECTION_KEYS, len(load.keys))))
            with state.locked() as book:
                require(book)
                result, job = self._move(book, load)
                if job is not None:
                    job.announce = job.announce or announce
                return result, job
        except KVStoreError:
            with state.locked() as book:
                for i in load.moving:
                    book.unhold(load.slots[i])
            raise

    def _pin(self, book: Book, load: Load, part: tuple[int, int] | None) -> None:
        """Pin what is in place of a part of the keys, and hold what has to move."""
        before = len(load.moving)
        used = pin_found(
            book, load, self._state.readable, lambda key: self.why_missing(book, key, load.namespace), part
        )
        begin, end = part or (0, len(load.keys))
        if load.lease is not None:
            book.use(used.slots)
            count_found(book.counters, used.bits)
            if len(used.slots) < end - begin:
                count_refused(book.counters, load.result(), range(begin, end))
            if load.namespace.policy.write is WritePolicy.SECOND_HIT:
                self._write_second_hits(book, used.slots)
        # So that no block loses its last copy while its job waits.
        for i in load.moving[before:]:
            book.hold(load.slots[i])

    def _move(self, book: Book, load: Load) -> tuple[FetchResult, Job | None]:
        """Make a job of what has to move, if anything has."""
        state = self._state
        if not load.moving:
            return load.result(), None
        owners = state.owners
        job = Job(JobId(owners.next_id()), load.owner, load.result(), load.lease)
        task = self._loading.task(load, lambda book: self._finish(book, job, load))
        job.cancel = lambda: self._loading.cancel(load, lambda book: self._finish(book, job, load))
        if not owners.has_room("jobs", load.owner.peer, state.config) or not self._queues.submit_load(task):
            for i in load.moving:
                book.unhold(load.slots[i])
                load.settle(i, Outcome.BUSY, Reason.NO_SPACE)
            book.counters.count("loads_refused_queue_full", len(load.moving))
            tier = Tier.DEVICE if load.target is Target.DEVICE else Tier.HOST
            load.busy = Busy(tier, 0, 0, 0)
            if load.lease is not None:
                count_refused(book.counters, load.result(), load.moving)
            return load.result(), None
        load.owner.buffer_io += 1
        owners.add_job(job)
        if load.lease is not None:
            load.lease.jobs.add(job.job_id)
        job.result = load.result(job.job_id)
        return job.result, job

    def _finish(self, book: Book, job: Job, load: Load) -> None:
        """The job has its final answer."""
        state = self._state
        self._tenancy.buffer_io_end(book, load.owner)
        job.result = load.result()
        if job.lease is not None:
            job.lease.jobs.discard(job.job_id)
            count_refused(book.counters, job.result, load.moving)
        job.finished_at = state.clock.now()
        callback = self.on_job_done
        if callback is not None and job.announce and job.job_id in state.owners.jobs:
            session_id, job_id, result = job.owner.session_id, job.job_id, job.result
            state.afterwards(lambda: callback(session_id, job_id, result))
        job.done.set()

    @property
    def queued(self) -> tuple[int, int]:
        """Loads and writes that wait for a mover."""
        return self._queues.waiting

    def wait(self, job: Job, seconds: float) -> FetchResult:
        """Wait for a job; its answer counts as read when it is final. The job is announced if it is not."""
        job.done.wait(seconds)
        with self._state.locked():
            if job.done.is_set():
                self._state.owners.take_job(job)
            else:
                job.announce = True
            return job.result

    def wait_job(self, owner: Owner, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache.wait_job``."""
        validate.check_wait("timeout_ms", timeout_ms)
        with self._state.locked():
            owner.require_open()
            job = self._state.owners.job(owner, job_id)
        return self.wait(job, timeout_ms / 1000)

    def _write_second_hits(self, book: Book, slots: Sequence[int]) -> None:
        # The commit was the first use.
        self._queues.queue_writes(book, [s for s in slots if book.index.hits[s] == 2 and not book.has(s, Tier.SSD)])
