"""Sees that the event loop turns: past its time, the stacks of all threads go to the log's stream, once a stall."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that waits for beats of the loop. ``stalls`` counts those that came late."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beats = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvstore-watchdog", daemon=True)
        self._timer: asyncio.TimerHandle | None = None
        self.stalls = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; call on the loop's thread."""
        self._beat(loop)
        self._thread.start()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beats.set()
        self._timer = loop.call_later(self._limit_s / 4, self._beat, loop)

    def _watch(self) -> None:
        while not self._ended.is_set():
            if self._beats.wait(self._limit_s):
                self._beats.clear()
                # One wait a quarter of the limit is often enough, and leaves the processor alone in between.
                self._ended.wait(self._limit_s / 4)
                continue
            self._tell()
            self._beats.wait()

    def _tell(self) -> None:
        self.stalls += 1
        began = time.monotonic()
        log.error("the event loop has not turned for %.1f s; stacks of all threads follow", self._limit_s)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        log.error("stacks were written in %.3f s", time.monotonic() - began)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        self._beats.set()
