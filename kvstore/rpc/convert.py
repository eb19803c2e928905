"""Old name of ``kvstore.wire.messages``, for callers written against 0.1 before both ends of the wire had a room."""

from __future__ import annotations

from kvstore.wire.messages import *  # noqa: F403  one room, two names
