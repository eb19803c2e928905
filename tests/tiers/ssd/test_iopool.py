"""The pool's buffers and its bound on bytes in flight."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from dataclasses import dataclass, field

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.tiers.ssd.iopool import IoPool, _Buffers


def test_buffers_are_aligned_apart_and_join_again():
    buffers, chance = _Buffers(1 << 20), random.Random(1)
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        if held and chance.random() < 0.5:
            buffers.give(*held.pop(chance.randrange(len(held))))
            continue
        nbytes = 4096 * chance.randint(1, 64)
        found = buffers.take(nbytes)
        if found is not None:
            start, view = found
            assert start % 4096 == 0
            assert len(view) == nbytes
            assert all(start + nbytes <= other or other + size <= start for other, size in held)
            held.append((start, nbytes))
    for one in held:
        buffers.give(*one)
    whole = buffers.take(1 << 20)
    assert whole is not None
    assert buffers.take(4096) is None


@dataclass
class Counting:
    """Counts how many bytes are under way at once."""

    nbytes: int
    state: dict[str, int]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, buffer: memoryview, gate: object) -> None:
        with self.lock:
            self.state["now"] += len(buffer)
            self.state["most"] = max(self.state["most"], self.state["now"])
        with self.lock:
            self.state["now"] -= len(buffer)


def test_bytes_in_flight_are_bounded_not_workers():
    pool = IoPool("test", 8, 64 << 10, MonotonicClock())
    state, lock = {"now": 0, "most": 0}, threading.Lock()
    operations = [Counting(nbytes, state, lock) for nbytes in [16 << 10, 48 << 10, 4096, 60 << 10] * 50]
    assert pool.run(operations, 30.0) == [None] * 200
    assert 0 < state["most"] <= 64 << 10
    pool.close()
    (error,) = pool.run([Counting(1, state, lock)], 1.0)
    assert isinstance(error, OSError)


@dataclass
class Failing:
    nbytes: int = 4096

    def run(self, buffer: memoryview, gate: object) -> None:
        raise ValueError("a bug")


def test_any_exception_reaches_the_caller_and_the_thread_lives_on():
    pool = IoPool("test", 1, 64 << 10, MonotonicClock())
    errors = pool.run([Failing(), Failing()], 30.0)
    assert [str(error) for error in errors] == ["a bug", "a bug"]
    pool.close()


@pytest.fixture
def no_cycles():
    """Without the collector, what a cycle of references holds stays for ever."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Memory:
    """What a caller up the stack holds, such as views of a session's buffer."""


def test_an_error_that_was_raised_keeps_nothing_of_its_callers(no_cycles):
    pool = IoPool("test", 1, 64 << 10, MonotonicClock())

    def fails():
        mine = Memory()
        held.append(weakref.ref(mine))
        with contextlib.suppress(ValueError):
            pool.do(Failing(), 30.0)

    held = []
    fails()
    assert held[0]() is None
    pool.close()


@pytest.mark.parametrize("kind", [Failing, lambda: Counting(4096, {"now": 0, "most": 0})])
def test_a_thread_without_work_keeps_nothing_of_what_it_did_last(no_cycles, kind):
    pool = IoPool("test", 1, 64 << 10, MonotonicClock())
    operation = kind()
    kept = weakref.ref(operation, lambda _: gone.set())
    gone = threading.Event()
    pool.run([operation], 30.0)
    del operation
    assert gone.wait(30)
    assert kept() is None
    pool.close()
