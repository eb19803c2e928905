"""The scheduler: which tokens of which requests the next step computes.

A step takes at most ``token_budget`` tokens: first one token of each request that is decoding, then chunks of prompts,
in order of rank (priority, then arrival). A request gets places for its tokens from DEVICE; where DEVICE is short the
engine's own blocks are moved to HOST; where HOST is short too, the request of lowest rank gives up its memory and comes
back later (what it committed stays in the cache). The request of highest rank can take from all others, and takes
private memory when there is nobody left to take from: so there is always one that goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.engine.config import EngineConfig
from kvstore.engine.counters import Counters
from kvstore.engine.link import CacheLink
from kvstore.engine.manager import BlockManager
from kvstore.engine.sequence import FinishReason, RequestId, Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Share:
    """``count`` tokens of a sequence, from ``computed`` on, that the step computes; places for them are claimed."""

    sequence: Sequence
    count: int

    @property
    def draws(self) -> bool:
        """True if the step reaches the sequence's last token, so that the next one can be drawn."""
        return self.count == self.sequence.remaining


class Scheduler:
    """Owns the requests: waiting ones by rank, and admitted ones that hold memory."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, link: CacheLink, counters: Counters) -> None:
        self._config = config
        self._blocks = blocks
        self._link = link
        self._counters = counters
        self._waiting: list[Sequence] = []
        self._admitted: list[Sequence] = []
        self._held_back = False
        self._entries = 0
        self.starved: list[Sequence] = []
        """Requests that ended since nothing could hold them, and the engine was not told yet; it takes them out."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._admitted)

    @property
    def running(self) -> int:
        """Requests that are admitted."""
        return len(self._admitted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self._waiting, *self._admitted])

    def add(self, sequence: Sequence) -> None:
        """Take a new request."""
        self._waiting.append(sequence)
        self._waiting.sort(key=_rank)

    def plan(self) -> list[Share]:
        """The next step's shares, places claimed; empty if every request waits for a job. Raises LinkLost."""
        self._blocks.poll()
        self._give_up()
        self._admit()
        self._settle_prefixes()
        budget = self._config.token_budget
        shares: dict[RequestId, Share] = {}
        ready = [s for s in self._admitted if s.state is SequenceState.RUNNING]
        for sequence in sorted(ready, key=lambda s: (s.remaining > 1, *s.rank)):
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue
            count = self._claim(sequence, min(sequence.remaining, budget), shares)
            if count:
                shares[sequence.request_id] = Share(sequence, count)
                budget -= count
        return list(shares.values())

    def wait(self) -> None:
        """Sleep until a job ends or the cache is to be tried again, for ``config.wait_ms`` at most. Raises LinkLost."""
        self._blocks.poll(self._config.wait_ms)
        self._link.pause(self._config.wait_ms)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request and give up what it holds. Raises LinkLost, with the request ended all the same."""
        sequence.state, sequence.reason = SequenceState.FINISHED, reason
        for requests in (self._waiting, self._admitted):
            if sequence in requests:
                requests.remove(sequence)
        # What one request gave up is enough for one other, seldom for all that wait.
        self._entries = 1
        self._blocks.release(sequence)

    def find(self, request_id: RequestId) -> Sequence | None:
        """The request of this id, if it has not ended."""
        return next((s for s in self if s.request_id == request_id), None)

    def link_lost(self) -> None:
        """The cache's session ended: those that held blocks of it begin again, now without it."""
        self._blocks.forget(self._admitted)
        for sequence in [s for s in self._admitted if not s.table.blocks]:
            self._back_to_waiting(sequence)
        self._held_back = False

    def _needs_cache(self, sequence: Sequence) -> bool:
        """True while the cache is lost, and nothing but the cache can hold a request's context."""
        return self._link.lost and not self._blocks.cooling.fits_own(len(sequence.tokens))

    def _give_up(self) -> None:
        """End the requests that have waited for a lost cache for too long."""
        if self._link.lost and self._link.away_s >= self._config.cache_wait_s:
            for sequence in [s for s in self._waiting if self._needs_cache(s)]:
                self.starved.append(sequence)
                self.finish(sequence, FinishReason.CACHE)

    def _admit(self) -> None:
        """Let waiting requests in by rank.

        After a preemption only those that outrank an admitted one come in, and one more for each that ends.
        """
        for first in [s for s in self._waiting if not self._needs_cache(s)]:
            lowest = max(self._admitted, key=_rank, default=None)
            outranks = lowest is not None and first.priority > lowest.priority
            if lowest is None:
                self._held_back = False
            elif self._held_back and not outranks:
                if not self._entries:
                    return
                self._entries -= 1
            if lowest is not None and len(self._admitted) >= self._config.running_max:
                if not outranks:
                    return
                self._preempt(lowest)
            self._waiting.remove(first)
            first.state = SequenceState.FETCHING
            self._admitted.append(first)

    def _settle_prefixes(self) -> None:
        for sequence in self._admitted:
            if sequence.state is not SequenceState.FETCHING:
                continue
            if sequence.job is not None and self._blocks.jobs.is_open(sequence.job):
                continue
            sequence.job = None
            if self._blocks.attach(sequence):
                sequence.state = SequenceState.RUNNING

    def _claim(self, sequence: Sequence, wanted: int, shares: dict[RequestId, Share]) -> int:
        """Places for up to ``wanted`` tokens; 0 if the sequence must wait or has ended for want of memory."""
        if sequence.table.private or not self._link.up:
            return self._blocks.grow_private(sequence, wanted) or self._claim_by_force(sequence, wanted, shares)
        granted = self._blocks.grow(sequence, wanted)
        if granted or self._blocks.moving:
            return granted
        return self._claim_by_force(sequence, wanted, shares)

    def _claim_by_force(self, sequence: Sequence, wanted: int, shares: dict[RequestId, Share]) -> int:
        """Take memory from requests of lower rank, the lowest first; private memory when there are none at all."""
        others = [s for s in self._admitted if s is not sequence]
        while others:
            lowest = max(others, key=_rank)
            if lowest.rank < sequence.rank:
                return 0
            shares.pop(lowest.request_id, None)
            others.remove(lowest)
            self._preempt(lowest)
            granted = self._grow_any(sequence, wanted)
            if granted or self._blocks.moving:
                return granted
        granted = 0
        if self._link.up and not sequence.table.private:
            granted = self._blocks.grow_streaming(sequence, wanted)
            if self._blocks.moving:
                return granted
        granted = granted or self._blocks.grow_private(sequence, wanted)
        if not granted:
            self.starved.append(sequence)
            self.finish(sequence, FinishReason.MEMORY)
        return granted

    def _grow_any(self, sequence: Sequence, wanted: int) -> int:
        if sequence.table.private or not self._link.up:
            return self._blocks.grow_private(sequence, wanted)
        return self._blocks.grow(sequence, wanted)

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._held_back, self._entries = True, 0
        self._back_to_waiting(sequence)
        self._blocks.release(sequence)

    def begin_again(self, sequence: Sequence) -> None:
        """Give up what a request holds, so that it begins again from its tokens. Raises LinkLost."""
        self._back_to_waiting(sequence)
        self._blocks.release(sequence)

    def _back_to_waiting(self, sequence: Sequence) -> None:
        self._admitted.remove(sequence)
        sequence.state = SequenceState.WAITING
        self.add(sequence)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
