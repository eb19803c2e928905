"""Threads that do disk I/O through aligned buffers of their own, with a bound on bytes in flight and a deadline.

An operation never does I/O on its caller's memory: a stalled device may finish a read long after the caller gave
up, so bytes pass through the pool's buffers, and are copied to or from the caller's memory only while the caller
waits. The one lock of a pool guards its queue, the free list of its buffers and the stage of every operation.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

from kvstore.core.clock import Clock
from kvstore.kernels.layout import align_up
from kvstore.tiers.ssd.format import PAGE_BYTES


class Stage(Enum):
    """Where an operation is. Only in COPYING is the caller's memory touched."""

    QUEUED = "queued"
    IO = "io"
    COPYING = "copying"
    DONE = "done"
    ABANDONED = "abandoned"


class Gate(Protocol):
    """What an operation asks before it touches its caller's memory."""

    def enter_copy(self) -> bool:
        """True if the caller still waits; then it waits until ``leave_copy``."""

    def leave_copy(self) -> None:
        """The caller's memory is let go."""


class Operation(Protocol):
    """One I/O of at most the pool's bytes in flight."""

    nbytes: int

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Do it through ``buffer`` (``nbytes`` rounded up to pages, page-aligned). May raise OSError."""


class _Buffers:
    """First-fit ranges of one aligned mapping, allocated once."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._starts = [0]
        self._sizes = [nbytes]

    def take(self, nbytes: int) -> tuple[int, memoryview] | None:
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                start = self._starts[index]
                if size == nbytes:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += nbytes
                    self._sizes[index] -= nbytes
                return start, self._view[start : start + nbytes]
        return None

    def give(self, start: int, nbytes: int) -> None:
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and start + nbytes == self._starts[index]:
            nbytes += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += nbytes
        else:
            self._starts.insert(index, start)
            self._sizes.insert(index, nbytes)


class _Batch:
    """The operations of one caller, which waits on ``done``; it shares the pool's lock."""

    def __init__(self, lock: threading.Lock, remaining: int) -> None:
        self.done = threading.Condition(lock)
        self.remaining = remaining


class _Task:
    """One operation of a batch, and its gate."""

    def __init__(self, operation: Operation, batch: _Batch, lock: threading.Lock) -> None:
        self.operation = operation
        self.batch = batch
        self.stage = Stage.QUEUED
        self.started = 0.0
        self.error: BaseException | None = None
        self._lock = lock

    def take_error(self) -> BaseException | None:
        """The error. Frames of its traceback refer to this task, which therefore keeps it no longer."""
        error, self.error = self.error, None
        return error

    def enter_copy(self) -> bool:
        with self._lock:
            if self.stage is Stage.ABANDONED:
                return False
            self.stage = Stage.COPYING
            return True

    def leave_copy(self) -> None:
        with self._lock:
            if self.stage is Stage.COPYING:
                self.stage = Stage.IO
                self.batch.done.notify_all()


class IoPool:
    """A queue of operations and the threads that do them."""

    def __init__(self, name: str, threads: int, bytes_in_flight: int, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._buffers = _Buffers(bytes_in_flight)
        self._clock = clock
        self._queue: deque[_Task] = deque()
        self._progress = clock.now()
        self._closed = False
        self._threads: Final = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Operations that wait for a thread or a buffer."""
        return len(self._queue)

    def run(self, operations: Sequence[Operation], deadline_s: float) -> list[BaseException | None]:
        """Do operations, in any order, and return an error or None for each.

        TimeoutError stands for an operation that was stuck, or waited in a queue that stood still, for longer
        than ``deadline_s``; its caller's memory is not touched after this returns.
        """
        if not operations:
            return []
        batch = _Batch(self._lock, len(operations))
        tasks = [_Task(operation, batch, self._lock) for operation in operations]
        with self._lock:
            if self._closed:
                return [OSError("the I/O pool is closed") for _ in tasks]
            if not self._queue:
                self._progress = self._clock.now()
            self._queue.extend(tasks)
            self._ready.notify(len(tasks))
            while batch.remaining:
                left = self._left(tasks, deadline_s)
                if left <= 0:
                    self._abandon(tasks, deadline_s)
                    break
                batch.done.wait(left)
        return [task.take_error() for task in tasks]

    def do(self, operation: Operation, deadline_s: float) -> None:
        """``run`` of one operation. Raises its error."""
        errors = self.run([operation], deadline_s)
        if errors[0] is not None:
            # Out of the list: an error that a frame of its own traceback refers to keeps all of them, and their memory.
            raise errors.pop()  # type: ignore[misc]

    def close(self) -> None:
        """Let the threads end when their queue is empty; does not wait for a stuck one."""
        with self._lock:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout=0.5)

    def _left(self, tasks: Sequence[_Task], deadline_s: float) -> float:
        """Seconds until the first open task is late: a queued one waits as long as others make progress."""
        begin = min(
            self._progress if task.stage is Stage.QUEUED else task.started
            for task in tasks
            if task.stage is not Stage.DONE
        )
        return begin + deadline_s - self._clock.now()

    def _abandon(self, tasks: Sequence[_Task], deadline_s: float) -> None:
        for task in tasks:
            while task.stage is Stage.COPYING:
                task.batch.done.wait()
            if task.stage is not Stage.DONE:
                task.stage = Stage.ABANDONED
                task.error = TimeoutError(f"no answer from the device for {deadline_s} s")

    def _work(self) -> None:
        while True:
            with self._lock:
                taken = self._take()
                while taken is None:
                    if self._closed and not self._queue:
                        return
                    self._ready.wait()
                    taken = self._take()
                task, start, buffer = taken
                task.stage = Stage.IO
                task.started = self._progress = self._clock.now()
                if self._queue:
                    self._ready.notify()
            error: BaseException | None = None
            try:
                task.operation.run(buffer, task)
            except BaseException as caught:  # noqa: BLE001 - handed to the caller, who waits for it
                error = caught
            with self._lock:
                self._buffers.give(start, len(buffer))
                self._progress = self._clock.now()
                if task.stage is not Stage.ABANDONED:
                    task.error = error
                    task.stage = Stage.DONE
                    task.batch.remaining -= 1
                    if not task.batch.remaining:
                        task.batch.done.notify_all()
            # The caller's memory and the error's frames are not kept until the next operation comes.
            del task, taken, buffer, error

    def _take(self) -> tuple[_Task, int, memoryview] | None:
        while self._queue and self._queue[0].stage is Stage.ABANDONED:
            self._queue.popleft()
        if not self._queue:
            return None
        found = self._buffers.take(align_up(max(self._queue[0].operation.nbytes, 1), PAGE_BYTES))
        if found is None:
            return None
        return self._queue.popleft(), *found
