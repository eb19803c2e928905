"""The block manager: which blocks each sequence has, shared by key within the engine and pinned in the cache.

One registry, by key, of the SEALED blocks in use: two sequences with the same prefix hold the same Block, it is pinned
once, and moving it serves both. Calls to the cache are bookkeeping ones; what takes longer is a job and is polled.

Used by the engine's thread only. Every method that talks to the cache raises ``LinkLost`` when the session ends; the
engine then calls ``forget``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.cache import FetchResult
from kvstore.core.errors import InternalError
from kvstore.core.keys import chain_keys
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, Outcome, Place, ReservationId, Target, Tier
from kvstore.engine.blocks import Block, BlockState
from kvstore.engine.config import EngineConfig
from kvstore.engine.counters import Counters
from kvstore.engine.jobs import Jobs, MoveJob, PrefixJob, leading_hits
from kvstore.engine.link import CacheLink
from kvstore.engine.memory import PrivatePool
from kvstore.engine.sealing import Sealing, first_within
from kvstore.engine.sequence import Sequence, SequenceState
from kvstore.engine.staging import Staging

MOVE_BLOCKS_MIN = 4
"""Blocks moved at least when DEVICE is short: a call costs more than the bookkeeping of a few blocks."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an attempt to make room on DEVICE did: blocks moved at once, and whether more are on their way."""

    moved: int
    pending: bool


class BlockManager:
    """Places for the K and V of all sequences of one engine.

    Blocks wholly within the last ``config.recent_raw_tokens`` computed tokens of a sequence are not moved out of
    DEVICE, and not sealed either where that would encode them.
    """

    def __init__(self, link: CacheLink, spec: NamespaceSpec, config: EngineConfig, counters: Counters) -> None:
        self._link = link
        self._tokens = spec.block_tokens
        self._layout = BlockLayout.of(spec)
        self._pool = PrivatePool(self._layout, config.private_bytes, link.device)
        self._counters = counters
        self._registry: dict[BlockKey, Block] = {}
        self._recent_tokens = config.recent_raw_tokens
        self._open_tokens_asked = config.open_tokens
        self._encodes = spec.codec != "raw"
        self._staging = Staging(link, self._layout)
        self._sequences: set[Sequence] = set()
        self._stuck = False
        self.jobs = Jobs(link)

    # Prefixes

    def attach(self, sequence: Sequence) -> bool:
        """Find as much of the sequence's prefix as the cache holds, leaving one token to compute.

        Returns True when ``computed`` and ``table`` are settled, False while a job brings more (call again once
        ``poll`` has finished it).
        """
        if sequence not in self._sequences:
            self._sequences.add(sequence)
            self._stuck = False
        usable = (len(sequence.tokens) - 1) // self._tokens
        table = sequence.table
        if len(table.keys) < usable:
            table.keys = chain_keys(self._link.namespace, sequence.tokens[: usable * self._tokens], self._tokens)
        while self._link.up and not sequence.prefix_settled and len(table.blocks) < usable:
            if not self._attach_more(sequence, table.keys[len(table.blocks) : usable]):
                return False
        sequence.prefix_settled, self._stuck = True, False
        return True

    def poll(self, wait_ms: int = 0) -> None:
        """Finish the jobs that have ended: prefixes get their blocks, moved blocks their new address.

        Waits up to ``wait_ms`` for the oldest job.
        """
        for job_id, job, result in self.jobs.done(wait_ms):
            if isinstance(job, MoveJob):
                self._finish_move(job, result)
            else:
                self._settle(job, result, wanted=job.sequence.job == job_id)

    # Room

    def grow(self, sequence: Sequence, tokens: int) -> int:
        """Claim places on DEVICE for the next ``tokens`` tokens; returns for how many there are places now.

        Moves the engine's own blocks to HOST where DEVICE is short. Where the cache has no DEVICE the places are the
        pool's, and full blocks go to HOST.
        """
        missing = self._missing(sequence, tokens)
        if missing > 0 and self._link.up and not self._link.reaches(Area.DEVICE):
            self._take(sequence, missing, BlockState.STAGED)
        elif missing > 0 and self._link.up and not sequence.table.private:
            got, short_of = self._reserve(sequence, missing)
            # Where the session's buffer is full, moving blocks out of DEVICE would be of no use.
            if got < missing and short_of is not Tier.HOST and self.make_room(missing - got).moved:
                self._reserve(sequence, missing - got)
        return self._room(sequence, tokens)

    def grow_private(self, sequence: Sequence, tokens: int) -> int:
        """Like ``grow``, from the engine's own pool: for when the cache has no place and nobody can give one up."""
        taken = self._take(sequence, self._missing(sequence, tokens), BlockState.PRIVATE)
        sequence.table.private = sequence.table.private or taken > 0
        self._counters.blocks_private += taken
        return self._room(sequence, tokens)

    def _take(self, sequence: Sequence, count: int, state: BlockState) -> int:
        """Append up to ``count`` blocks of the pool; returns how many there were."""
        for taken in range(count):
            offset = self._pool.take()
            if offset is None:
                return taken
            sequence.table.blocks.append(Block(state, self._pool.region, offset, Area.NONE))
        return max(count, 0)

    def make_room(self, count: int) -> Room:
        """Move at least ``count`` of the engine's blocks from DEVICE to HOST, children before their parents.

        A block whose child is still in DEVICE cannot leave it, and a child always came into the registry later.
        """
        if self._stuck or not self._link.reaches(Area.HOST):
            return Room(0, self.moving)
        kept = self._recent()
        on_device = (
            b for b in reversed(self._registry.values()) if b.area is Area.DEVICE and not b.moving and b not in kept
        )
        wanted = max(count, MOVE_BLOCKS_MIN)
        blocks = [block for block, _ in zip(on_device, range(wanted), strict=False)]
        if not blocks:
            return Room(0, self.moving)
        keys = [_key_of(block) for block in blocks]
        result = self._link.call(
            lambda cache: cache.fetch(self._link.namespace, keys, Target.HOST, lease_id=self._link.moved)
        )
        moved = [(b, p) for b, p, o in zip(blocks, result.places, result.outcomes, strict=True) if o is Outcome.HIT]
        started = tuple(b for b, o in zip(blocks, result.outcomes, strict=True) if o is Outcome.PENDING)
        if started:
            for block in blocks:
                block.moving = True
            self.jobs.add(result.job_id, MoveJob(tuple(blocks)))
        else:
            self._swap(moved)
        return Room(0 if started else len(moved), self.moving)

    @property
    def moving(self) -> bool:
        """True while blocks are on their way from DEVICE to HOST."""
        return any(block.moving for block in self._registry.values())

    # Sealing and giving up

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Commit the blocks that have become full; a sequence whose block was refused goes back to compute it again."""
        self._seal(sequences, self._open_tokens)

    def _seal(self, sequences: Iterable[Sequence], open_tokens: int) -> None:
        if self._link.up:
            sealing = Sealing(self._link, self._registry, self._counters, self._tokens, self._staging)
            self._drop(sealing.run(sequences, open_tokens))

    def release(self, sequence: Sequence) -> None:
        """Give up all that the sequence holds. Its full blocks stay in the cache."""
        try:
            if self._open_tokens:
                self._seal([sequence], 0)
        finally:
            blocks = sequence.table.blocks
            self._sequences.discard(sequence)
            sequence.restart()
            self._drop(blocks)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """The link was lost: drop everything that was pinned through it. Sequences in private memory keep theirs."""
        self._registry.clear()
        self._sequences.clear()
        self.jobs.clear()
        self._stuck = False
        for sequence in sequences:
            blocks = sequence.table.blocks
            if blocks and all(block.pooled for block in blocks):
                sequence.table.make_private()
                continue
            for block in blocks:
                if block.pooled:
                    self._pool.give_back(block.offset)
            sequence.restart()

    def _drop(self, blocks: Iterable[Block]) -> None:
        """One user less for each block; those without users are given back."""
        tails: list[ReservationId] = []
        keys: dict[bool, list[BlockKey]] = {False: [], True: []}
        for block in blocks:
            block.users -= 1
            if block.users or block.moving:
                continue
            if block.pooled:
                self._pool.give_back(block.offset)
            elif block.reservation is not None:
                tails.append(block.reservation)
            elif block.key is not None:
                del self._registry[block.key]
                keys[block.moved].append(block.key)
        if tails and self._link.up:
            self._link.call(lambda cache: cache.abort(tails))
        if keys[False] or keys[True]:
            self._stuck = False
        self._link.release(self._link.pins, keys[False])
        self._link.release(self._link.moved, keys[True])

    # Inside

    def _attach_more(self, sequence: Sequence, keys: list[BlockKey]) -> bool:
        """One step of ``attach`` over the keys that are still missing; False if the sequence must wait for a job."""
        known = self._registry.get(keys[0])
        if known is not None:
            self._adopt(sequence, known, "engine")
            return True
        awaited = self.jobs.fetching(keys[0])
        if awaited is not None:
            sequence.job = awaited
            return False
        if self._is_being_computed(sequence, keys[0]):
            return False
        keys = self._unknown_run(keys)
        matched = self._link.call(lambda cache: cache.match(self._link.namespace, keys))
        found = keys[: matched.matched]
        if not found:
            sequence.prefix_settled = True
            return True
        target = Target.IN_PLACE if self._link.reaches(Area.HOST) else Target.DEVICE
        result = self._link.call(
            lambda cache: cache.fetch(self._link.namespace, found, target, lease_id=self._link.pins)
        )
        job = PrefixJob(tuple(found), matched.residency, sequence)
        if Outcome.PENDING in result.outcomes:
            self.jobs.add(result.job_id, job)
            sequence.job = result.job_id
            return False
        self._settle(job, result, wanted=True)
        return True

    def _is_being_computed(self, sequence: Sequence, key: BlockKey) -> bool:
        """True if a running request of higher rank computes the block of ``key``, which is this one's next.

        Never one of lower rank: it might wait for the memory that this one holds.
        """
        index = len(sequence.table.blocks)
        end = (index + 1) * self._tokens
        return any(
            other.state is SequenceState.RUNNING
            and other.rank < sequence.rank
            and not other.table.private
            and other.computed < end <= len(other.tokens) - self._open_tokens
            and other.table.keys[index : index + 1] == [key]
            for other in self._sequences
        )

    def _adopt(self, sequence: Sequence, block: Block, source: str) -> None:
        block.users += 1
        sequence.adopt(block, source, self._tokens)
        self._counters.tokens_from[source] += self._tokens

    def _unknown_run(self, keys: list[BlockKey]) -> list[BlockKey]:
        """The keys up to the first that the engine holds or waits for already: none may be pinned twice."""
        run = keys[:BATCH_KEYS_MAX]
        for index, key in enumerate(run):
            if key in self._registry or self.jobs.fetching(key) is not None:
                return run[:index]
        return run

    def _settle(self, job: PrefixJob, result: FetchResult, *, wanted: bool) -> None:
        """Give a sequence the blocks at the start of the run that came; the pins of the others are given back."""
        hits = leading_hits(result.outcomes) if wanted else 0
        surplus = [k for k, o in zip(job.keys[hits:], result.outcomes[hits:], strict=True) if o is Outcome.HIT]
        for key, bits, place in zip(job.keys[:hits], job.residency, result.places, strict=False):
            if place is None:
                raise InternalError(f"the cache answered HIT without a place for {key.hex()[:16]}")
            if key not in self._registry:
                block = Block(BlockState.SEALED, self._link.region(place.area), place.offset, place.area, place.codec)
                block.key, block.users = key, 0
                self._registry[key] = block
            self._adopt(job.sequence, self._registry[key], _hottest(bits))
        if wanted:
            job.sequence.job = None
            job.sequence.prefix_settled = hits < len(job.keys)
        self._link.release(self._link.pins, surplus)

    def _finish_move(self, job: MoveJob, result: FetchResult) -> None:
        for block in job.blocks:
            block.moving = False
        outcomes = zip(job.blocks, result.places, result.outcomes, strict=True)
        moved = [(block, place) for block, place, outcome in outcomes if outcome is Outcome.HIT]
        # HOST has no room for any of them: trying again before something is given back would wait for ever.
        self._stuck = not moved
        self._swap(moved)
        unused = [block for block in job.blocks if not block.users]
        for block in unused:
            block.users = 1
        self._drop(unused)

    def _swap(self, moved: list[tuple[Block, Place | None]]) -> None:
        """Point blocks at their HOST copies and let go of the DEVICE ones."""
        for block, place in moved:
            if place is None:
                raise InternalError("the cache answered HIT without a place for a block moved to HOST")
            block.region, block.offset = self._link.region(place.area), place.offset
            block.area, block.codec, block.moved = place.area, place.codec, True
        self._counters.blocks_demoted += len(moved)
        self._link.release(self._link.pins, [_key_of(block) for block, _ in moved])

    def _reserve(self, sequence: Sequence, count: int) -> tuple[int, Tier | None]:
        """Append up to ``count`` tail blocks; returns for how many was room, and what was short (HOST: buffer)."""
        result = self._link.call(lambda cache: cache.reserve(self._link.namespace, Tier.DEVICE, count=count))
        got = 0
        for outcome, reservation, place in zip(result.outcomes, result.reservation_ids, result.places, strict=True):
            if outcome is Outcome.PENDING and place is not None:
                block = Block(BlockState.TAIL, self._link.region(place.area), place.offset, place.area)
                block.reservation = reservation
                sequence.table.blocks.append(block)
                got += 1
        return got, result.busy.tier if result.busy is not None else None

    @property
    def _open_tokens(self) -> int:
        """Last tokens of a sequence whose full blocks are not sealed yet, since that would encode them."""
        if self._encodes and self._link.up and not self._link.reaches(Area.DEVICE):
            return self._recent_tokens
        return self._open_tokens_asked

    def _recent(self) -> set[Block]:
        """Blocks within the recent window of any sequence."""
        kept: set[Block] = set()
        if self._recent_tokens:
            for sequence in self._sequences:
                first = first_within(sequence.computed, self._recent_tokens, self._tokens)
                kept.update(sequence.table.blocks[first:])
        return kept

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        return -(-(sequence.computed + tokens) // self._tokens) - len(sequence.table.blocks)

    def _room(self, sequence: Sequence, tokens: int) -> int:
        return min(tokens, len(sequence.table.blocks) * self._tokens - sequence.computed)


def _key_of(block: Block) -> BlockKey:
    if block.key is None:
        raise InternalError("a block without a key is in the registry")
    return block.key


def _hottest(bits: int) -> str:
    """Name of the hottest tier of a residency set."""
    return next((tier.name.lower() for tier in Tier if bits & tier.bit), Tier.SSD.name.lower())
