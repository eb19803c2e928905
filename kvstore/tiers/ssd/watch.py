"""A deadline for recovery, whose calls are many and whose time is not known: each call of the disk has to end in time.

Recovery runs on a thread of its own behind a port that notes when each call began. When one is stuck, its caller gives
up, and the port lets nothing through any more: the thread ends at that call, should it ever return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar, cast

from kvstore.core.clock import Clock
from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd.core import Core
from kvstore.tiers.ssd.port import DiskPort

T = TypeVar("T")

LOOK_S: Final = 0.05
"""How often is looked whether a call is stuck, at most; less under a short deadline."""


class Watch:
    """Meets ``DiskPort`` by handing calls on; the lock guards what is under way."""

    def __init__(self, port: DiskPort, clock: Clock) -> None:
        self._port = port
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        self._over = False

    def __getattr__(self, name: str) -> object:
        found = getattr(self._port, name)
        return (lambda *args, **named: self._do(found, *args, **named)) if callable(found) else found

    def _do(self, call: Callable[..., T], *args: object, **named: object) -> T:
        thread = threading.get_ident()
        with self._lock:
            self._check()
            self._begun[thread] = self._clock.now()
        try:
            return call(*args, **named)
        finally:
            with self._lock:
                self._begun.pop(thread, None)
                self._check()

    def _check(self) -> None:
        # No OSError: nothing takes it for an error of the disk and goes on.
        if self._over:
            raise TierUnavailable("recovery was given up")

    def give_up_after(self, seconds: float) -> bool:
        """True if a call is under way for so long; then nothing goes through any more."""
        with self._lock:
            self._over = bool(self._begun) and self._clock.now() - min(self._begun.values()) >= seconds
            return self._over


def watched(core: Core, work: Callable[[], T]) -> T:
    """Do work whose calls all go through ``core.port``; raises what it raises, TimeoutError when a call is stuck."""
    port, deadline_s = core.port, core.config.io_deadline_s
    watch = Watch(port, core.clock)
    core.port = cast("DiskPort", watch)
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="ssd-recover", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(min(LOOK_S, deadline_s / 4))
            if thread.is_alive() and watch.give_up_after(deadline_s):
                raise TimeoutError(f"no answer from the device for {deadline_s} s")
    finally:
        core.port = port
    if errors:
        raise errors.pop()
    return results[0]
