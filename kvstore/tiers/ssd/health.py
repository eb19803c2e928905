"""Health of the tier: ready, or degraded with the reason, apart for reads and for writes.

A failed or stuck write refuses writes; a stuck read, or several failed ones in a row, refuses reads. Refusing is
at once: nobody queues behind a stalled device. A probe (``probe.py``) brings both back.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd.config import SsdConfig

log: Final = logging.getLogger("kvstore.ssd")


class Health:
    """Thread-safe; the lock guards the fields below it."""

    def __init__(self, config: SsdConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._reads_ok = True
        self._writes_ok = True
        self._read_errors = 0
        self._next_probe = 0.0
        self.last_error = ""
        self.degradations = 0
        self.errors: Counter[str] = Counter({"io_error_read": 0, "io_error_write": 0, "io_error_stall": 0})
        """Operations that failed, and those that did not end in time; by the names of Status."""

    @property
    def state(self) -> str:
        """ "ready" or "degraded"."""
        return "ready" if self._reads_ok and self._writes_ok else "degraded"

    @property
    def reads_ok(self) -> bool:
        """Whether reads are tried."""
        return self._reads_ok

    def require_writes(self) -> None:
        """Raise TierUnavailable while writes are refused."""
        if not self._writes_ok:
            raise TierUnavailable(f"the SSD tier is degraded: {self.last_error}")

    def read_succeeded(self) -> None:
        """A read worked: failures in a row start anew."""
        self._read_errors = 0

    def read_failed(self, what: str, error: BaseException) -> None:
        """A read failed; a timeout counts as a stalled device at once."""
        with self._lock:
            self._read_errors += 1
            self._count("read", error)
            self.note(what, error)
            if isinstance(error, TimeoutError) or self._read_errors >= self._config.read_errors_max:
                self._degrade(reads=True, writes=isinstance(error, TimeoutError))

    def write_failed(self, what: str, error: BaseException) -> None:
        """A write or a sync failed; a timeout refuses reads too, since the device may be stalled."""
        with self._lock:
            self._count("write", error)
            self.note(what, error)
            self._degrade(reads=isinstance(error, TimeoutError), writes=True)

    def failed(self, what: str) -> None:
        """Nothing works until the next start: reads and writes are refused."""
        with self._lock:
            self.last_error = what
            self._degrade(reads=True, writes=True)

    def probe_due(self) -> bool:
        """Whether it is time to try again; then the next time is set."""
        with self._lock:
            now = self._clock.now()
            if self.state == "ready" or now < self._next_probe:
                return False
            self._next_probe = now + self._config.probe_interval_s
            return True

    def recovered(self) -> None:
        """The probe worked."""
        with self._lock:
            if self.state == "degraded":
                log.warning("the SSD tier is ready again; the last error was: %s", self.last_error)
            self._reads_ok = self._writes_ok = True
            self._read_errors = 0

    def _count(self, way: str, error: BaseException) -> None:
        self.errors["io_error_stall" if isinstance(error, TimeoutError) else f"io_error_{way}"] += 1

    def note(self, what: str, error: BaseException | str) -> None:
        """Remember an error for people."""
        self.last_error = f"{what}: {error}"

    def _degrade(self, *, reads: bool, writes: bool) -> None:
        if self.state == "ready":
            self.degradations += 1
            self._next_probe = self._clock.now() + self._config.probe_interval_s
            log.error("the SSD tier is degraded: %s", self.last_error)
        self._reads_ok = self._reads_ok and not reads
        self._writes_ok = self._writes_ok and not writes
