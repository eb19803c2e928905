"""A cache whose session ends at a chosen call, its memory overwritten at once: what is still trusted then shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.core.errors import Unavailable
from kvstore.core.types import Tier
from kvstore.store.store import Store
from tests.engine.stores import clear_tier


class FlakyCache:
    """Meets ``Cache`` over an embedded one.

    The call number ``fail_at`` (from 1) and the ``away`` calls after it raise; with mode "lost-after" the failing call
    is carried out first, so that only its answer is lost; with "silent" it does not raise but is carried out in the
    new session. Of the new session nothing is known but what was committed. ``generation`` counts sessions, as a
    client's does.
    """

    def __init__(self, store: Store, fail_at: int, *, away: int = 0, mode: str = "lost-before") -> None:
        self._store = store
        self._inner = store.open_session("flaky", buffer_bytes=64 << 20)
        self._fail_at = fail_at
        self._away = away
        self._mode = mode
        self.calls = 0
        self.generation = 0

    def device_tensor(self) -> None:
        """No call of the daemon's, so never one that fails."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._fail_at:
                if self._mode == "lost-after":
                    method(*arguments, **options)
                self._end_session()
            if self._mode != "silent" and self._fail_at <= self.calls <= self._fail_at + self._away:
                raise Unavailable(f"call {self.calls}, {name}, was chosen to fail")
            return getattr(self._inner, name)(*arguments, **options)

        return call

    @property
    def failed(self) -> bool:
        """True once the chosen call was made."""
        return self.calls >= self._fail_at

    def close(self) -> None:
        """End the present session; never one of the calls that fail."""
        self._inner.close()

    def _end_session(self) -> None:
        self._inner.close()
        flusher = self._store.open_session("flusher")
        flusher.flush()
        flusher.close()
        for tier in (Tier.DEVICE, Tier.HOST):
            clear_tier(self._store, tier)
        for arena in (self._store.device, self._store.host):
            if arena is None or arena.used_bytes:
                raise AssertionError(f"{arena} still holds something after its session ended")
            np.frombuffer(arena.view(0, arena.capacity_bytes), np.uint8)[:] = 0xFF
        self._inner = self._store.open_session("flaky again", buffer_bytes=64 << 20)
        self.generation += 1
