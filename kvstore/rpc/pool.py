"""A thread pool that refuses what it could not begin soon, and that can be closed without waiting for ever."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore.core.errors import ResourceExhausted, Unavailable

log = logging.getLogger(__name__)

Tell = Callable[[Any, BaseException | None], object]
"""Takes what a call returned, or None and what it raised. Called in the pool's thread; must not block."""


class Job:
    """One call in a pool. It holds a slot until it has ended, or was dropped before a thread took it."""

    __slots__ = ("call", "context", "pool", "tell", "waiting")

    def __init__(self, pool: BoundedPool, call: Callable[[], Any], tell: Tell) -> None:
        self.pool, self.call, self.tell = pool, call, tell
        self.context = contextvars.copy_context()
        """Of whoever submitted it: what is run and told for a request is so under the request's id."""
        self.waiting = True

    def drop(self) -> bool:
        """Keep it from beginning; nothing is told then. False if a thread has taken it already."""
        return self.pool.drop(self)


class BoundedPool:
    """Threads that are started as they are needed. ``_lock`` guards ``_calls``, ``_threads``, ``_closed`` and whether
    a job waits.

    Not concurrent.futures' own: a call there and its future on the loop take 60 calls of Python functions, more than a
    small commit, and at exit the interpreter waits for its threads without a limit.
    """

    def __init__(self, name: str, threads: int, queue_max: int) -> None:
        self.name = name
        self._threads_max = threads
        self._bound = threads + queue_max
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._calls = 0
        self._closed = False

    def submit(self, call: Callable[[], Any], tell: Tell) -> Job:
        """Run ``call`` in the pool. Raises ResourceExhausted at the bound, Unavailable once closed."""
        job = Job(self, call, tell)
        with self._lock:
            if self._closed:
                raise Unavailable("the daemon is stopping")
            if self._calls >= self._bound:
                raise ResourceExhausted(
                    f"{self._calls} calls are under way in the daemon's {self.name} pool; try again",
                    field="calls",
                    value=self._calls,
                    expected=f"below {self._bound}",
                )
            self._calls += 1
            if len(self._threads) < min(self._calls, self._threads_max):
                self._start()
        self._jobs.put(job)
        return job

    def _start(self) -> None:
        """One thread more. Lock held."""
        name = f"kvstore-{self.name}_{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def drop(self, job: Job) -> bool:
        """See ``Job.drop``."""
        with self._lock:
            if not job.waiting:
                return False
            job.waiting = False
            self._calls -= 1
            return True

    @property
    def calls(self) -> int:
        """Calls that hold a slot: under way, or waiting for a thread."""
        return self._calls

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if not job.waiting:
                    continue
                job.waiting = False
            answer, failure = None, None
            try:
                answer = job.context.run(job.call)
            except BaseException as error:  # noqa: BLE001  whatever it is belongs to the caller
                failure = error
            with self._lock:
                self._calls -= 1
            try:
                job.context.run(job.tell, answer, failure)
            except RuntimeError as error:
                log.debug("nobody is left to be told: %s", error)
            # What it holds is not kept until the next one comes.
            del job, answer, failure

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no new calls, drop those that wait, let those under way end for at most ``timeout_s``.

        Whether all have ended. Threads that have not keep no process from its exit.
        """
        with self._lock:
            self._closed = True
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None and self.drop(job):
                try:
                    job.tell(None, Unavailable("the daemon is stopping"))
                except RuntimeError as error:
                    log.debug("nobody is left to be told: %s", error)
        for _ in self._threads:
            self._jobs.put(None)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
