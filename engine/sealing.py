"""Sealing: full tail blocks become shared blocks of the cache, in one commit for all sequences of a step.

The content decides who owns the bytes. If another request of the engine holds the key already, the sequence takes that
block and gives its own place back; if the cache had it, the commit answers where, and the sequence goes on there.
If the cache refuses (it drains, the block was dropped), the place is gone with its bytes: the sequence goes back to the
start of that block, computes it again, and keeps it and what follows in private memory, where no refusal can reach it.
A block that was filled in the engine's own pool, where the cache has no DEVICE, stays there when it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstore.cache import CommitEntry
from kvstore.core.keys import block_key
from kvstore.core.types import ROOT_PARENT, Area, BlockKey, Outcome, Place, ReservationId
from kvstore.engine.blocks import Block, BlockState, Registry
from kvstore.engine.counters import Counters
from kvstore.engine.link import CacheLink
from kvstore.engine.sequence import Sequence
from kvstore.engine.staging import Staging


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Block ``index`` of a sequence, full and not sealed, and its entry in the commit."""

    sequence: Sequence
    index: int
    block: Block
    entry: CommitEntry


def first_within(computed: int, window: int, block_tokens: int) -> int:
    """Index of the first block that lies wholly within the last ``window`` of ``computed`` tokens."""
    return -(-max(0, computed - window) // block_tokens)


class Sealing:
    """Commits full blocks; ``registry`` is the manager's, by key."""

    def __init__(
        self, link: CacheLink, registry: Registry, counters: Counters, block_tokens: int, staging: Staging
    ) -> None:
        self._link = link
        self._staging = staging
        self._registry = registry
        self._counters = counters
        self._tokens = block_tokens

    def run(self, sequences: Iterable[Sequence], open_tokens: int = 0) -> list[Block]:
        """Seal what is full, but for blocks wholly within the last ``open_tokens`` tokens of their sequence.

        Returns blocks that sequences no longer use, for the manager to drop. Raises LinkLost.
        """
        waiting = list(sequences)
        spare: list[Block] = []
        while waiting:
            spare += self._one_commit(waiting, open_tokens)
            waiting = [sequence for sequence in waiting if self._full_blocks(sequence, open_tokens)]
        return spare

    def _one_commit(self, sequences: list[Sequence], open_tokens: int) -> list[Block]:
        """Seal each sequence up to a block whose key another one commits at the same time."""
        spare: list[Block] = []
        new: list[_Candidate] = []
        claimed: set[BlockKey] = set()
        for sequence in sequences:
            for candidate in self._full_blocks(sequence, open_tokens):
                if candidate.entry.key in claimed:
                    break
                shared = self._registry.get(candidate.entry.key)
                if shared is not None:
                    spare.append(self._share(candidate, shared))
                else:
                    claimed.add(candidate.entry.key)
                    new.append(candidate)
        new = self._staged(new)
        return spare + self._commit(new) if new else spare

    def _staged(self, new: list[_Candidate]) -> list[_Candidate]:
        """The candidates with reservations for those of the pool: fewer where the buffer is full.

        Where not even the first one fits, which no retry mends, its sequence keeps it and goes on in private memory.
        """
        if not new or new[0].block.state is not BlockState.STAGED:
            return new
        reservations = self._staging.stage([candidate.block for candidate in new])
        if not reservations:
            new[0].sequence.table.make_private()
        return [
            replace(candidate, entry=replace(candidate.entry, reservation_id=reservation))
            for candidate, reservation in zip(new, reservations, strict=False)
        ]

    def _full_blocks(self, sequence: Sequence, open_tokens: int) -> list[_Candidate]:
        """The sequence's blocks to seal, parents first. Their keys are put into the table."""
        table, size = sequence.table, self._tokens
        found: list[_Candidate] = []
        end = min(sequence.computed // size, first_within(sequence.computed, open_tokens, size))
        for index in range(table.sealed, end):
            block = table.blocks[index]
            if block.reservation is None and block.state is not BlockState.STAGED:
                break
            parent = table.keys[index - 1] if index else ROOT_PARENT
            if index == len(table.keys):
                tokens = sequence.tokens[index * size : (index + 1) * size]
                table.keys.append(block_key(self._link.namespace, parent, tokens))
            entry = CommitEntry(block.reservation or ReservationId(0), table.keys[index], parent)
            found.append(_Candidate(sequence, index, block, entry))
        return found

    def _share(self, candidate: _Candidate, shared: Block) -> Block:
        """Take the engine's own block of this key; returns the one that it replaces."""
        table = candidate.sequence.table
        own = candidate.block
        shared.users += 1
        table.replace(candidate.index, shared)
        table.sealed = candidate.index + 1
        self._counters.blocks_existed += 1
        return own

    def _commit(self, new: list[_Candidate]) -> list[Block]:
        tokens = [t for c in new for t in self._tokens_of(c)]
        result = self._link.call(
            lambda cache: cache.commit(
                self._link.namespace, [c.entry for c in new], token_ids=tokens, lease_id=self._link.pins
            )
        )
        spare: list[Block] = []
        surplus: list[BlockKey] = []
        for candidate, outcome, existed, place in zip(new, result.outcomes, result.existed, result.places, strict=True):
            pinned = outcome is Outcome.HIT and place is not None
            readable = pinned and place is not None and self._link.reaches(place.area)
            if readable and place is not None and candidate.index == candidate.sequence.table.sealed:
                if candidate.block.pooled:
                    # A block of its own for the place in the pool, to be dropped.
                    spare.append(Block(BlockState.STAGED, candidate.block.region, candidate.block.offset, Area.NONE))
                self._seal(candidate, place, existed=existed)
                continue
            if pinned:
                surplus.append(candidate.entry.key)
            if candidate.block.pooled:
                candidate.sequence.table.make_private()
                continue
            # The reservation is gone with the bytes; a block after a refused one is of no use to its sequence.
            candidate.block.reservation = None
            spare += self._back_to(candidate)
        self._link.release(self._link.pins, surplus)
        return spare

    def _seal(self, candidate: _Candidate, place: Place, *, existed: bool) -> None:
        block = candidate.block
        block.state, block.reservation = BlockState.SEALED, None
        block.place(self._link.region(place.area), place.offset, place.area, place.codec)
        self._registry.add(candidate.entry.key, block)
        candidate.sequence.table.sealed = candidate.index + 1
        self._counters.blocks_sealed += 1
        self._counters.blocks_existed += existed

    def _back_to(self, candidate: _Candidate) -> list[Block]:
        """Send a sequence back to the start of the refused block; returns the tail blocks that it gives up."""
        sequence, index = candidate.sequence, candidate.sequence.table.sealed
        given_up = sequence.table.cut(index)
        sequence.computed = min(sequence.computed, index * self._tokens)
        sequence.table.private = True
        return given_up

    def _tokens_of(self, candidate: _Candidate) -> list[int]:
        begin = candidate.index * self._tokens
        return candidate.sequence.tokens[begin : begin + self._tokens]
