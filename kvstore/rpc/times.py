"""How long calls take, by method, and why they fail: what operators watch. Written on the event loop's thread only.

Any thread may read; one that comes between two additions sees one call more or less.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.core.errors import KVStoreError
from kvstore.core.histogram import BOUNDS_S, Histogram

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MethodTimes(Histogram):
    """Calls of one method."""

    failures: dict[str, int] = field(default_factory=dict)
    """By reason of the error, as the wire names it."""


class CallTimes:
    """A histogram a method, made at its first call: whoever counts lets through names of methods only."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._of: dict[str, MethodTimes] = {}
        self._told = log.isEnabledFor(logging.DEBUG)

    def count(self, name: str, began: float, failure: str = "") -> None:
        """A call that began at ``began`` (of ``now``) has ended."""
        found = self._of.get(name)
        if found is None:
            found = self._of[name] = MethodTimes()
        seconds = self.now() - began
        # As ``found.add``, which is a call more a request.
        found.within[bisect_left(BOUNDS_S, seconds)] += 1
        found.seconds += seconds
        if failure:
            found.failures[failure] = found.failures.get(failure, 0) + 1
        if self._told:
            log.debug("%s: %s after %.3f ms", name, failure or "done", seconds * 1000)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Count a stream that lasts as long as this."""
        began, failure = self.now(), ""
        try:
            yield
        except KVStoreError as error:
            failure = error.reason
            raise
        except asyncio.CancelledError:
            failure = "CANCELLED"
            raise
        except Exception:
            failure = KVStoreError.reason
            raise
        finally:
            self.count(name, began, failure)

    def by_method(self) -> dict[str, MethodTimes]:
        """What was counted so far, by name on the wire; the caller must not change it."""
        return dict(self._of)
