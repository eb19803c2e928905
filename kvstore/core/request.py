"""Which call is being worked on: what a log line says beside its text, and whoever reads the log follows."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

REQUEST: Final[ContextVar[str]] = ContextVar("request", default="")
"""Id of the call that this thread, or this task of the loop, works for; "" for none.

On the session socket the session's number and the call's in it, apart by a dash; over gRPC a number with a g, or what
the caller sent as metadata ``kvstore-request``.
"""
