"""How whatever takes long is told that nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]
"""Asked now and then by what takes long: True ends it, since its caller has gone or the daemon ends."""


def never() -> bool:
    """The ``Stop`` of a caller that waits to the end."""
    return False
