"""Old name of ``kvstore.cache``, for callers written against 0.1 before it had a file of its own."""

from __future__ import annotations

from kvstore.cache import (
    Cache,
    CommitEntry,
    CommitResult,
    FetchResult,
    MatchResult,
    NearNamespace,
    OpenedNamespace,
    ReserveResult,
)

__all__ = [
    "Cache",
    "CommitEntry",
    "CommitResult",
    "FetchResult",
    "MatchResult",
    "NearNamespace",
    "OpenedNamespace",
    "ReserveResult",
]
