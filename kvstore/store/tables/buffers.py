"""The private buffers of sessions, bounded together: memory that one client takes is not there for all others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.core.errors import ResourceExhausted
from kvstore.tiers.host import BufferArena


class _Counted(BufferArena):
    """A buffer whose bytes count until it is closed."""

    def __init__(self, nbytes: int, give_back: Callable[[int], None]) -> None:
        super().__init__(nbytes)
        self._nbytes = nbytes
        self._give_back: Callable[[int], None] | None = give_back

    def close(self) -> None:
        """Give the memory back, once. It counts until the mapping is gone."""
        try:
            super().close()
        finally:
            give_back, self._give_back = self._give_back, None
            if give_back is not None:
                give_back(self._nbytes)


class Buffers:
    """Makes buffers while all that are open stay within ``nbytes_max`` bytes. The lock guards the sum."""

    def __init__(self, nbytes_max: int) -> None:
        self._max = nbytes_max
        self._lock = threading.Lock()
        self.nbytes = 0
        """Of all buffers that are open or being made."""

    def __call__(self, nbytes: int) -> BufferArena:
        """A new buffer, faulted in. Raises ResourceExhausted where it does not fit beside the others."""
        with self._lock:
            if self.nbytes + nbytes > self._max:
                raise ResourceExhausted(
                    f"a buffer of {nbytes} bytes does not fit: buffers of sessions take {self.nbytes} bytes of "
                    f"buffers_max = {self._max}",
                    field="buffer_bytes",
                    value=nbytes,
                    expected=f"at most {self._max - self.nbytes} now",
                )
            self.nbytes += nbytes
        try:
            return _Counted(nbytes, self._give_back)
        except BaseException:
            self._give_back(nbytes)
            raise

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes
