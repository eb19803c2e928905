"""What was asked for and what came of it, as counters: found by tier, missed by reason, put. Lock held in all of these.

Counted once a call and not once a key: a run that is found whole takes one pass over its residency column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

from kvstore.cache import FetchResult
from kvstore.core.types import Outcome, Reason, Tier
from kvstore.store.tables.history import Counters
from kvstore.store.tables.namespaces import Namespace

_FOUND: Final = ("", *(f"fetch_found_{Tier((bits & -bits).bit_length()).name.lower()}" for bits in range(1, 256)))
"""Counters by residency: making the name anew takes eight calls a fetch."""


def count_match(counters: Counters, asked: int, found: int, reason: Reason) -> None:
    """A match: the keys behind the first that is missing count as missed for the same reason."""
    counters.count("match_found", found)
    if found < asked:
        counters.count(f"match_missed_{reason.name.lower()}", asked - found)


def count_found(counters: Counters, residency: bytes) -> None:
    """Keys of a fetch that are resident, each under the hottest tier that it lay on when it was asked for."""
    for bits in set(residency):
        counters[_FOUND[bits]] += residency.count(bits)


def count_refused(counters: Counters, result: FetchResult, positions: Iterable[int]) -> None:
    """Of these keys of a fetch, those whose answer is final and no HIT."""
    refused = Counter(
        (result.outcomes[p], result.reasons[p]) for p in positions if result.outcomes[p] in (Outcome.MISS, Outcome.BUSY)
    )
    for (outcome, reason), count in refused.items():
        counters.count("fetch_busy" if outcome is Outcome.BUSY else f"fetch_missed_{reason.name.lower()}", count)


class PutEntry(Protocol):
    """One block of a commit, when its answer is known."""

    outcome: Outcome
    reason: Reason
    existed: bool


def count_put(counters: Counters, namespace: Namespace, entries: Iterable[PutEntry]) -> None:
    """Blocks of a commit: new, resident already (that somebody else stored first), or refused, by reason."""
    new = existed = 0
    for entry in entries:
        if entry.outcome is not Outcome.HIT:
            counters.count(f"put_refused_{entry.reason.name.lower()}")
        elif entry.existed:
            existed += 1
        else:
            new += 1
    counters["put_new"] += new
    namespace.brought += new
    if existed:
        counters["put_existed"] += existed
