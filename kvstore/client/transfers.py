"""What an engine holds while blocks move: the transfer that it began, and what a lookup found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from types import TracebackType
from typing import Self

from kvstore.cache import NearNamespace
from kvstore.client.flow_get import OwnLease
from kvstore.client.flow_lookup import Looked
from kvstore.core.errors import DeadlineExceeded, KVStoreError
from kvstore.core.types import BlockKey, NamespaceId, Outcome, Reason, Tier


class Transfer:
    """A load or a store that was begun. It ends by itself, whatever becomes of the daemon; then nothing touches the
    engine's memory any more.

    ``taken`` of a store is how many keys, from the first on, were copied: their memory is the engine's again, as soon
    as ``store`` has returned. Those after them did not fit into the session's buffer and are BUSY: offer them again.
    """

    def __init__(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        self.namespace_id = namespace_id
        self.keys = keys
        self.taken = len(keys)
        self.outcomes: tuple[Outcome, ...] = ()
        """One a key once it is done: HIT where the block was loaded, or is stored now."""
        self.reasons: tuple[Reason, ...] = ()
        self.error: KVStoreError | None = None
        """What ended it, where no answer of the daemon did."""
        self.elsewhere: dict[BlockKey, Transfer] = {}
        """Of a store: keys that another one, which was begun before, copies."""
        self._ended = threading.Event()

    def done(self) -> bool:
        """Whether it has ended. Never waits."""
        return self._ended.is_set()

    def result(self, timeout_s: float | None = None) -> tuple[Outcome, ...]:
        """Wait for the end and return the outcomes. Raises DeadlineExceeded where it has not come by then."""
        if not self._ended.wait(timeout_s):
            raise DeadlineExceeded(f"the transfer has not ended within {timeout_s:g} s", field="timeout_s")
        return self.outcomes

    def end(self, outcomes: Sequence[Outcome], reasons: Sequence[Reason]) -> None:
        """For the client: it has ended."""
        self.outcomes, self.reasons = tuple(outcomes), tuple(reasons)
        self._ended.set()


class Found:
    """What a lookup found: the run of blocks, from the first key on, that every namespace has.

    With ``hold`` they stay in some tier, and the lease is renewed, until ``release``. ``lost`` says that it ended
    before: a connection that broke, a process that was stopped for longer than its lease.
    """

    def __init__(self, looked: Looked | None, release: Callable[[Found], None]) -> None:
        self.looked = looked
        self._release = release
        self.lost = False

    @property
    def matched(self) -> int:
        """Blocks that are there."""
        return self.looked.matched if self.looked is not None else 0

    @property
    def lease(self) -> OwnLease | None:
        """What holds them, for the client."""
        return self.looked.lease if self.looked is not None else None

    @property
    def held(self) -> bool:
        """Whether they are held now."""
        return self.lease is not None and not self.lost

    @property
    def residency(self) -> tuple[int, ...]:
        """For each of the matched blocks the tiers, as bits, that have it in all namespaces."""
        if self.looked is None:
            return ()
        return tuple(reduce(and_, bits) for bits in zip(*(run.residency for run in self.looked.runs), strict=False))[
            : self.matched
        ]

    def resident(self, tier: Tier, first: int = 0) -> bool:
        """Whether all matched blocks from ``first`` on are in ``tier``."""
        return all(bits & tier.bit for bits in self.residency[first:])

    @property
    def near(self) -> tuple[NearNamespace, ...]:
        """Namespaces of the same model that were opened with another spec: why there may be nothing."""
        return next((run.near for run in self.looked.runs if run.near), ()) if self.looked is not None else ()

    @property
    def reason(self) -> Reason:
        """Why there are no more."""
        if self.looked is None:
            return Reason.TIER_UNAVAILABLE
        return next((run.reason for run in self.looked.runs if run.matched == self.matched), Reason.NONE)

    def release(self) -> None:
        """Let go what is held. Waits for nothing. Idempotent."""
        self._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
