"""Bounds of the service, checked at birth."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may ask for, and how long they may wait.

    ``requests_max``    answers under way or waiting at one time (``n`` counts); above it 429
    ``choices_max``     largest ``n``, and most prompts of one request
    ``body_max``        bytes of a request's body; above it 413
    ``timeout_s``       longest time of an answer, from its arrival; a request may ask for less. Past it 504
    ``stuck_s``         time without progress after which a request that was let in is cancelled
    """

    requests_max: int = 256
    choices_max: int = 16
    body_max: int = 16 << 20
    timeout_s: float = 600.0
    stuck_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("requests_max", "choices_max", "body_max"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"limits.{name}", getattr(self, name), "at least 1")
        for name in ("timeout_s", "stuck_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument(f"limits.{name}", getattr(self, name), "seconds, more than 0")
