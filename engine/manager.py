"""The block manager: which blocks each sequence has, shared by key within the engine and pinned in the cache.

One registry, by key, of the SEALED blocks in use: two sequences with the same prefix hold the same Block, it is pinned
once, and moving it serves both. Calls to the cache are bookkeeping ones; what takes longer is a job and is polled.

Used by the engine's thread only. Every method that talks to the cache raises ``LinkLost`` when the session ends; the
engine then calls ``forget``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvstore.cache import FetchResult
from kvstore.core.errors import InternalError
from kvstore.core.keys import chain_keys
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, LeaseId, Outcome, Place, ReservationId, Target, Tier
from kvstore.engine.blocks import Block, BlockState, Registry
from kvstore.engine.cold_readers import ColdReaders
from kvstore.engine.config import EngineConfig
from kvstore.engine.cooling import Cooling, cold_run, hottest, key_of
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
        self._registry = Registry()
        self.readers = ColdReaders(link, self._layout, spec.block_tokens)
        self.cooling = Cooling(link, self._registry, counters, spec, config)
        self._recent_tokens = config.recent_raw_tokens
        self._open_tokens_asked = config.open_tokens
        self._encodes = spec.codec != "raw"
        self._staging = Staging(link, self._layout)
        self._sequences: set[Sequence] = set()
        self._stuck = False
        self._moves = 0
        self._streaming: set[Sequence] = set()
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
            if self._streaming and self._link.reaches(Area.BUFFER):
                # The other half of the buffer is for what is read from storage.
                missing = min(missing, max(1, self._link.region(Area.BUFFER).nbytes // 2 // self._layout.device_bytes))
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

    def grow_streaming(self, sequence: Sequence, tokens: int) -> int:
        """Like ``grow``, and the engine's blocks may leave memory for it from now on, while this sequence runs."""
        self._streaming.add(sequence)
        return self.grow(sequence, tokens)

    def _take(self, sequence: Sequence, count: int, state: BlockState) -> int:
        """Append up to ``count`` blocks of the pool; returns how many there were."""
        for taken in range(count):
            offset = self._pool.take()
            if offset is None:
                return taken
            sequence.table.append(Block(state, self._pool.region, offset, Area.NONE))
        return max(count, 0)

    def make_room(self, count: int) -> Room:
        """Move at least ``count`` of the engine's blocks out of DEVICE, those that came there first.

        They go to HOST while the engine's share of it has room; after that to storage, once a sequence streams.
        """
        kept = self._recent()
        on_device = (b for b in self._registry.within(Area.DEVICE) if not b.moving and b not in kept)
        blocks = list(islice(on_device, max(count, MOVE_BLOCKS_MIN)))
        if not blocks:
            return Room(0, self.moving)
        if self._stuck or not self._link.reaches(Area.HOST) or self.cooling.host_room < len(blocks):
            return Room(self.cooling.make_room(blocks) if self._streaming else 0, self.moving)
        keys = [key_of(block) for block in blocks]
        result = self._link.call(
            lambda cache: cache.fetch(self._link.namespace, keys, Target.HOST, lease_id=self._link.moved)
        )
        moved = [(b, p) for b, p, o in zip(blocks, result.places, result.outcomes, strict=True) if o is Outcome.HIT]
        started = tuple(b for b, o in zip(blocks, result.outcomes, strict=True) if o is Outcome.PENDING)
        if started:
            for block in blocks:
                block.moving = True
            self._moves += 1
            self.jobs.add(result.job_id, MoveJob(tuple(blocks)))
        else:
            self._swap(moved)
        return Room(0 if started else len(moved), self.moving)

    @property
    def moving(self) -> bool:
        """True while blocks are on their way from DEVICE to HOST."""
        return self._moves > 0

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
            self._sequences.discard(sequence)
            self._streaming.discard(sequence)
            table = sequence.table
            self._drop(sequence.restart())
            self.readers.close(table)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """The link was lost: drop everything that was pinned through it. Sequences in private memory keep theirs."""
        self._registry.clear()
        self._sequences.clear()
        self.jobs.clear()
        self._streaming.clear()
        self.readers.forget()
        self._stuck = False
        self._moves = 0
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
        keys: dict[LeaseId, list[BlockKey]] = {}
        for block in blocks:
            block.users -= 1
            if block.users or block.moving:
                continue
            if block.pooled:
                self._pool.give_back(block.offset)
            elif block.reservation is not None:
                tails.append(block.reservation)
            elif block.key is not None:
                self._registry.remove(block)
                lease = self._link.held if block.state is BlockState.COLD else self._link.lease_of(block.moved)
                keys.setdefault(lease, []).append(block.key)
        if tails and self._link.up:
            self._link.call(lambda cache: cache.abort(tails))
        if keys:
            self._stuck = False
        for lease, given in keys.items():
            self._link.release(lease, given)

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
        in_place = self._link.reaches(Area.HOST)
        count, stays = cold_run(matched.residency, self._host_room if in_place else len(keys))
        found = keys[:count]
        if stays:
            found = found[: self.cooling.hold(found)]
            self._adopt_cold(sequence, found)
        if stays or not found:
            sequence.prefix_settled = not found
            return True
        target = Target.IN_PLACE if in_place else Target.DEVICE
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

    def _adopt_cold(self, sequence: Sequence, keys: list[BlockKey]) -> None:
        for key in keys:
            block = Block(BlockState.COLD, self._link.region(Area.HOST), 0, Area.NONE)
            block.users = 0
            self._registry.add(key, block)
            self._adopt(sequence, block, Tier.SSD.name.lower())
        self._streaming.add(sequence)

    @property
    def _host_room(self) -> int:
        return 0 if self._stuck else self.cooling.host_room

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
                block.users = 0
                self._registry.add(key, block)
            shared = self._registry.get(key)
            if shared is not None:
                self._adopt(job.sequence, shared, hottest(bits))
        if wanted:
            job.sequence.job = None
            # What memory has no room for stays in storage; what is missing is computed.
            self._stuck = Outcome.BUSY in result.outcomes[hits : hits + 1]
            job.sequence.prefix_settled = hits < len(job.keys) and not self._stuck
        self._link.release(self._link.pins, surplus)

    def _finish_move(self, job: MoveJob, result: FetchResult) -> None:
        self._moves -= 1
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
            self._registry.place(block, self._link.region(place.area), place.offset, place.area, place.codec)
            block.moved = True
        self._counters.blocks_demoted += len(moved)
        self._link.release(self._link.pins, [key_of(block) for block, _ in moved])

    def _reserve(self, sequence: Sequence, count: int) -> tuple[int, Tier | None]:
        """Append up to ``count`` tail blocks; returns for how many was room, and what was short (HOST: buffer)."""
        result = self._link.call(lambda cache: cache.reserve(self._link.namespace, Tier.DEVICE, count=count))
        got = 0
        for outcome, reservation, place in zip(result.outcomes, result.reservation_ids, result.places, strict=True):
            if outcome is Outcome.PENDING and place is not None:
                block = Block(BlockState.TAIL, self._link.region(place.area), place.offset, place.area)
                block.reservation = reservation
                sequence.table.append(block)
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
