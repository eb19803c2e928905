"""One request's life: what was asked, the tokens so far, and what the engine holds for it.

::

    WAITING   holds nothing: new, preempted, or its blocks were lost
    FETCHING  some of its prefix is on the way from a colder tier
    RUNNING   its tokens from ``computed`` on are to be computed
    FINISHED  holds nothing; ``reason`` says why it ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kvstore.core.types import JobId
from kvstore.engine.blocks import Block, BlockTable
from kvstore.engine.sampling import Draw, SamplingParams
from kvstore.engine.text import TextStream

RequestId = NewType("RequestId", int)


class SequenceState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """``tokens_max``, or the model's last position."""
    ABORTED = "aborted"
    MEMORY = "memory"
    """Neither the cache nor the engine's own pool could hold its context."""
    CACHE = "cache"
    """The cache was lost, did not come back in time, and the engine's own pool can not hold its context."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. ``computed`` tokens have their K and V in ``table``; at least one has not.

    ``length`` is 0 unless short requests go before long ones.
    """

    request_id: RequestId
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams
    sampler: Draw
    priority: int
    length: int = 0
    stream: TextStream | None = None
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    state: SequenceState = SequenceState.WAITING
    job: JobId | None = None
    prefix_settled: bool = False
    cached_tokens: dict[str, int] = field(default_factory=dict)
    reason: FinishReason | None = None

    def adopt(self, block: Block, source: str, block_tokens: int) -> None:
        """Take a sealed block that holds the next tokens of the prefix; ``source`` says where it was found."""
        self.table.append(block)
        self.table.sealed += 1
        self.computed += block_tokens
        self.cached_tokens[source] = self.cached_tokens.get(source, 0) + block_tokens

    def restart(self) -> list[Block]:
        """Forget all blocks, which are the caller's to give back: the sequence begins again from its tokens."""
        blocks = self.table.cut(0)
        self.table, self.computed = BlockTable(), 0
        self.job, self.prefix_settled = None, False
        return blocks

    @property
    def remaining(self) -> int:
        """Tokens whose K and V are still to be computed before the next token can be drawn; at least 1."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts by importance: higher priority first, then the shorter one where that counts, then earlier arrival."""
        return (-self.priority, self.length, self.request_id)


@dataclass(frozen=True, slots=True)
class Progress:
    """``computed`` of a request's ``known`` tokens have their K and V; ``waiting`` until it is let in."""

    computed: int
    known: int
    waiting: bool

    @classmethod
    def of(cls, sequence: Sequence) -> Progress:
        """Of a request as it is now."""
        return cls(sequence.computed, len(sequence.tokens), sequence.state is SequenceState.WAITING)
