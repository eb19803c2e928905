"""What both clients decide alike: which errors are the caller's, and how failures are told."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from kvstore.cache import FetchResult
from kvstore.client.state import ClientState
from kvstore.core.errors import InvalidArgument, KVStoreError, NamespaceMismatch
from kvstore.core.types import JobId

log = logging.getLogger("kvstore.client")

CALLERS_ERRORS: Final = (InvalidArgument, NamespaceMismatch)
"""Errors in the caller's program or configuration: they raise whether or not the client is strict, since a cache
that hides them would miss for ever."""

_LOUD_UNTIL: Final = 3
_LOUD_EVERY: Final = 1000


@dataclass(frozen=True, slots=True)
class Completion:
    """A job that has ended, and its final result."""

    job_id: JobId
    result: FetchResult


def note_failure(state: ClientState, method: str, error: KVStoreError) -> None:
    """Count a failure that the caller does not see; the first few of each kind and every thousandth are logged."""
    times = state.failed(method, error)
    if times <= _LOUD_UNTIL or times % _LOUD_EVERY == 0:
        log.warning("%s failed and counts as a miss (%d times so far): %s", method, times, error)
