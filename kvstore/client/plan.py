"""Reading plans: slices of many blocks, read from storage layer by layer into memory of the session, again and again.

::

    with client.plan(namespace_id, keys) as plan:
        for piece in plan.pieces():        # layer by layer, in key order
            use(piece.layer, piece.first, piece.count, piece.data)
        plan.restart()                     # the next step, without resolving keys again

A plan resolves its keys once. The daemon's native threads then read ahead of its reader, as far as the ring has room,
check every slice where it lands, and say so in memory that both share: no message is sent for a piece, and nothing is
done for a block in Python on either side. ``Plan.open`` works over any ``Cache`` whose session has a buffer.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.cache import Cache, PlanKeys, PlanOpened, PlanPass
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.core.namespace import PAGE_BITS
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, Codec, NamespaceId, Outcome, Reason
from kvstore.kernels.plan_engine import (
    CONTROL_BYTES,
    MISSING,
    NO_BLOCK,
    PIECE_BYTES,
    PIECES_OFFSET,
    available,
    give_back,
    wait_landed,
)

if TYPE_CHECKING:
    from types import TracebackType

LOOK_S: Final = 0.1
"""How often a reader that waits looks whether its session still lives."""
TIMEOUT_S: Final = 60.0

_PIECE: Final = struct.Struct("<7I")
_MASK: Final = 0xFFFFFFFF
_NO_SESSION: Final = "the session has ended, and its plan with it"


class PlanEnded(KVStoreError):
    """The plan is over: a slice could not be read, nobody used it for its time, or the daemon went.

    ``why`` says which; ``key`` names the block whose slice failed, if one did: what came before it was right.
    """

    reason = "PLAN_ENDED"
    status = "UNAVAILABLE"

    def __init__(self, why: Reason, key: BlockKey | None, message: str) -> None:
        super().__init__(message, field="plan", value=why.name)
        self.why = why
        self.key = key


class Piece:
    """One layer of blocks that follow one another, or of those that a pass named.

    ``data`` is uint8 [count, slice_bytes], read only: slices as they are stored under ``codec``, dense, in order. It is
    the ring's memory, and the reader's until ``done`` (``copy`` what is to stay).
    """

    __slots__ = ("_plan", "_sequence", "codec", "count", "data", "first", "layer", "slice_bytes")

    def __init__(self, plan: Plan, sequence: int, numbers: tuple[int, int, int, int], codec: Codec) -> None:
        self._plan: Plan | None = plan
        self._sequence = sequence
        self.layer, self.first, self.count, self.slice_bytes = numbers
        self.codec = codec
        self.data: NDArray[np.uint8] = plan.memory_of(sequence, self.count, self.slice_bytes)

    def done(self) -> None:
        """Give the memory back, once; the daemon reads the next piece into it. Raises PlanEnded if the plan was ended
        meanwhile in a way that ``data`` may have been overwritten."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.give_back(self._sequence)


class Plan:
    """One reading plan. Not thread-safe: it has one reader. ``close`` it, or use it in a ``with`` statement.

    ``outcomes``, ``reasons`` and ``residency`` are by key, as in ``PlanKeys``; ``keys_mask`` (bool [keys]) says which
    are read. A MISS with a residency is in memory, where ``fetch`` finds it in place.
    """

    def __init__(
        self, cache: Cache, opened: PlanOpened, keys: Sequence[BlockKey], shape: tuple[int, int], timeout_s: float
    ) -> None:
        """Use ``open``. ``shape``: slots of the ring, and the first layer."""
        self._cache, self._opened, self._timeout_s = cache, opened, timeout_s
        self._slots, self._first_layer = shape
        self._keys: list[BlockKey] = []
        self.outcomes: list[Outcome] = []
        self.reasons: list[Reason] = []
        self.residency: list[int] = []
        self._enter(keys, opened.keys)
        self._generation = cache.generation
        self._passes: deque[PlanPass] = deque()
        self._taken = self._given = 0
        self._early: set[int] = set()
        """Pieces that were given back before others that came before them."""
        self._closed = opened.ring is None
        self._bell = -1
        if opened.ring is not None:
            self._bell = cache.plan_bell()
            begin, self._slot = opened.ring.offset, opened.ring.stride
            end = begin + CONTROL_BYTES + self._slots * self._slot
            self._ring = cache.memory(Area.BUFFER)[begin:end]
            self._bytes = np.frombuffer(self._ring, np.uint8)
            self._versions, self._page = cache.versions(Area.BUFFER), begin >> PAGE_BITS
            self._version = opened.ring.version

    @classmethod
    def open(  # noqa: PLR0913  the arguments of Cache.open_plan, and two of its own
        cls,
        cache: Cache,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        layers: tuple[int, int] | None = None,
        piece_bytes: int = 4 << 20,
        pieces: int = 4,
        idle_ms: int = 60_000,
        start: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """Open a plan over any number of keys, and begin a pass unless ``start`` is False.

        ``layers`` is a half-open range, None for all; ``pieces`` slots of ``piece_bytes`` are taken from the session's
        buffer. ``timeout_s`` is how long ``pieces`` waits for one. Raises ResourceExhausted (a strict client, or in
        process) where the ring does not fit, Unavailable without native code; a client that is not strict gets a plan
        of misses.
        """
        if not available():
            raise Unavailable(MISSING)
        first = list(keys[:BATCH_KEYS_MAX])
        opened = cache.open_plan(
            namespace_id, first, layers=layers, piece_bytes=piece_bytes, pieces=pieces, idle_ms=idle_ms
        )
        try:
            plan = cls(cache, opened, first, (pieces, layers[0] if layers else 0), timeout_s)
        except BaseException:
            if opened.plan_id:
                cache.close_plan(opened.plan_id)
            raise
        try:
            plan.extend(keys[BATCH_KEYS_MAX:])
            if start:
                plan.restart()
        except BaseException:
            plan.close()
            raise
        return plan

    # -- what it reads -------------------------------------------------------------------------------------------

    @property
    def keys_mask(self) -> NDArray[np.bool_]:
        """Which keys are read, bool [keys]."""
        return np.array([outcome is Outcome.HIT for outcome in self.outcomes], np.bool_)

    def extend(self, keys: Sequence[BlockKey]) -> None:
        """Add keys behind those that it has; passes that begin from now on read them, too. Raises UnknownPlan (a strict
        client, or in process) once it has ended."""
        for begin in range(0, len(keys), BATCH_KEYS_MAX):
            some = list(keys[begin : begin + BATCH_KEYS_MAX])
            if self._closed:
                self._enter(some, PlanKeys.missed(len(some)))
            else:
                self._enter(some, self._cache.extend_plan(self._opened.plan_id, some))

    def _enter(self, keys: Sequence[BlockKey], found: PlanKeys) -> None:
        self._keys += keys
        self.outcomes += found.outcomes
        self.reasons += found.reasons
        self.residency += found.residency

    # -- passes --------------------------------------------------------------------------------------------------

    def restart(self, *, ahead: bool = False) -> None:
        """Begin the next pass over all layers and keys. What is left of passes before it is dropped, and pieces of them
        that were kept are given back; with ``ahead`` it is queued behind them: the disk goes on between two steps."""
        self._queue(None, None, drop=not ahead)

    def queue(self, layer: int, indices: Sequence[int] | NDArray[np.int32] | None = None) -> None:
        """Queue a pass over one layer of all keys, or of these only, by index, in this order: for selected attention.

        ``pieces`` reads queued passes one after the other. InvalidArgument if one of them was a MISS.
        """
        self._queue(layer, indices, drop=False)

    def select(self, layer: int, indices: Sequence[int] | NDArray[np.int32]) -> Iterator[Piece]:
        """``queue`` and ``pieces`` in one: ``first`` and ``count`` of its pieces are a range of ``indices``."""
        self._queue(layer, indices, drop=bool(self._passes))
        return self.pieces()

    def _queue(self, layer: int | None, indices: Sequence[int] | NDArray[np.int32] | None, *, drop: bool) -> None:
        if self._closed:
            return
        if drop:
            self._passes.clear()
            self._early.update(range(self._given, self._taken))
            self.give_back(self._given)
        blocks = None if indices is None else np.asarray(indices).tolist()
        layers = None if layer is None else (layer, layer + 1)
        self._passes.append(self._cache.advance_plan(self._opened.plan_id, layers=layers, blocks=blocks, drop=drop))

    def pieces(self, *, keep: bool = False) -> Iterator[Piece]:
        """The pieces of the next pass, as they land. Each is given back when the next is asked for, unless ``done`` did
        that before; with ``keep`` that is left to ``done``, and as many may be kept as the ring has slots.

        Raises PlanEnded, and DeadlineExceeded where nothing lands within the plan's ``timeout_s``.
        """
        if not self._passes:
            return iter(())
        return self._read(self._passes.popleft(), keep)

    def _read(self, this: PlanPass, keep: bool) -> Iterator[Piece]:
        if not this.number:
            raise self._why()
        for _ in range(this.pieces):
            piece = self._next(this.number)
            try:
                yield piece
            finally:
                if not keep:
                    piece.done()

    def _next(self, number: int) -> Piece:
        while True:
            sequence = self._taken
            self._await(sequence + 1)
            self._taken = sequence + 1
            at = PIECES_OFFSET + PIECE_BYTES * (sequence % self._slots)
            _, made_by, layer, first, count, slice_bytes, codec = _PIECE.unpack_from(self._ring, at)
            if made_by == number:
                return Piece(self, sequence, (layer + self._first_layer, first, count, slice_bytes), Codec(codec))
            # Of a pass that was dropped.
            self.give_back(sequence)

    def _await(self, landed: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._closed:
            left = deadline - time.monotonic()
            seen = wait_landed(self._ring, landed & _MASK, max(0.0, min(left, LOOK_S)))
            self._require_held()
            if (seen.landed - landed) & _MASK < _MASK >> 1:
                return
            if seen.ended:
                raise self._ended(Reason(seen.reason), seen.block)
            if not self._cache.alive(self._generation):
                raise PlanEnded(Reason.TIER_UNAVAILABLE, None, _NO_SESSION)
            if left <= 0:
                raise DeadlineExceeded(f"no piece landed within {self._timeout_s:g} s", field="timeout_s")
        raise PlanEnded(Reason.NONE, None, "the plan was closed")

    def _require_held(self) -> None:
        """The ring is this plan's until the daemon takes its memory back, which raises the version of its pages."""
        try:
            held = self._versions[self._page] == self._version
        except ValueError as error:
            # In process, the memory has gone with its session.
            raise PlanEnded(Reason.TIER_UNAVAILABLE, None, _NO_SESSION) from error
        if not held:
            raise PlanEnded(Reason.DEADLINE, None, "nobody used the plan for its time, and the daemon took it back")

    def _why(self) -> PlanEnded:
        """Why no pass could be begun."""
        self._require_held()
        seen = wait_landed(self._ring, self._taken & _MASK, 0.0)
        return self._ended(Reason(seen.reason if seen.ended else Reason.TIER_UNAVAILABLE), seen.block)

    def _ended(self, why: Reason, block: int) -> PlanEnded:
        key = self._keys[block] if block != NO_BLOCK and block < len(self._keys) else None
        named = "" if key is None else f" at block {block}, {key.hex()[:16]}"
        return PlanEnded(why, key, f"the plan has ended{named}: {why.name}")

    # -- the ring ------------------------------------------------------------------------------------------------

    def memory_of(self, sequence: int, count: int, slice_bytes: int) -> NDArray[np.uint8]:
        """The slices of a piece, uint8 [count, slice_bytes], read only."""
        begin = CONTROL_BYTES + (sequence % self._slots) * self._slot
        found = self._bytes[begin : begin + count * slice_bytes].reshape(count, slice_bytes)
        found.flags.writeable = False
        return found

    def give_back(self, sequence: int) -> None:
        """A piece is not looked at any more; see ``Piece.done``."""
        if self._closed:
            return
        before = self._given
        if before <= sequence < self._taken:
            self._early.add(sequence)
        while self._given in self._early:
            self._early.discard(self._given)
            self._given += 1
        self._require_held()
        if self._given != before:
            give_back(self._ring, self._given & _MASK, self._bell)

    def close(self) -> None:
        """End the plan and give back ring and pins. Idempotent. ``data`` of its pieces is not to be used then."""
        if self._closed:
            return
        self._closed = True
        self._passes.clear()
        os.close(self._bell)
        if self._cache.alive(self._generation):
            self._cache.close_plan(self._opened.plan_id)

    def __enter__(self) -> Self:
        """Use the plan as a context manager: it is closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
