"""Reading plans in native code: threads that bring slices from files into a ring, and a reader's half of that ring.

What a plan, a pass and a piece are stands in ``native/plans.h``. Without the extension there are no plans:
``available()`` is false, and callers refuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvstore.kernels import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONTROL_BYTES: Final = 4096
"""Before the first slot of a ring."""
SLOTS_MAX: Final = 62
NO_BLOCK: Final = 0xFFFFFFFF
MISSING: Final = "there are no C++ kernels here, which read plans (kvctl doctor says why)"
"""Why plans are refused where ``available()`` is false."""
PIECES_OFFSET: Final = 64
PIECE_BYTES: Final = 64
"""Of what a ring tells of one piece; see ``PlanPiece`` there."""


class Kind(NamedTuple):
    """How blocks of one codec are cut: entries by layer of the plan, units counted from its first.

    ``first_unit`` has one more entry than there are layers. A slice is its units one after the other, each
    ``unit_bytes`` at distances of ``unit_stride``, of which ``slice_bytes`` count.
    """

    first_unit: list[int]
    slice_bytes: list[int]
    codec: list[int]
    """Told to the reader with each piece."""
    unit_bytes: int
    unit_stride: int


class EventKind(IntEnum):
    """What native code can not settle by itself."""

    TROUBLE = 0
    """A read failed, or came too late: the file is another's by now (``stale``)."""
    FILL = 1
    """A piece has blocks that no file has."""
    DRAINED = 2
    """The last read of a closed plan has ended."""


class Event(NamedTuple):
    """One of them; ``block`` counts in the plan."""

    plan: int
    kind: EventKind
    sequence: int
    block: int
    stale: bool


class Fill(NamedTuple):
    """The slice of ``layer`` (from the plan's first) of a block is wanted at ``to`` of the slot of a piece."""

    block: int
    layer: int
    to: int


class Stats(NamedTuple):
    """Counts of an engine since it was made."""

    reads: int
    read_bytes: int
    units: int
    landed_bytes: int
    stale: int
    failed: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Where blocks of one kind lie; shapes as in ``tiers.base.Located``. ``files`` are (fd, version, seen)."""

    blocks: NDArray[np.uint32]
    kind: int
    files: Sequence[tuple[int, NDArray[np.uint64], int]]
    file: NDArray[np.int32]
    planes: NDArray[np.uint8]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    crcs: NDArray[np.uint32]


class PlanEnded(Exception):  # noqa: N818  what it says, and no failure of the caller's
    """The plan is not there any more."""


class PlanFull(Exception):  # noqa: N818
    """Too much is queued for a plan."""


def available() -> bool:
    """Whether there can be plans here."""
    return native.available()


def address_of(memory: memoryview | np.ndarray[Any, Any]) -> int:
    """Where memory lies; its holder keeps it."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class PlanEngine:
    """The plans of one store, and the threads that read for them. Methods are thread-safe, and raise PlanEnded for a
    plan that is over. The GIL is free while they wait."""

    def __init__(self, threads: int, io_bytes: int) -> None:
        self._engine = native.extension().PlanEngine(threads, io_bytes)

    def stop(self, seconds: float) -> None:
        """End all plans and wait for the threads; one that is stuck in a read is left behind."""
        self._engine.stop(seconds)

    def add_bell(self, fd: int) -> None:
        """Listen to an eventfd that readers ring when they gave pieces back. The caller removes it before it closes."""
        self._engine.add_bell(fd)

    def remove_bell(self, fd: int) -> None:
        """No more."""
        self._engine.remove_bell(fd)

    def open(self, owner: int, ring: memoryview, slots: int, slot_bytes: int, kinds: Sequence[Kind]) -> int:
        """A plan without blocks. ``ring`` (writable) has CONTROL_BYTES and the slots, and stays until ``close``.

        Owners that read at the same time get as many bytes each. ValueError for a slice that is larger than a slot.
        """
        number: int = self._engine.open(owner, (address_of(ring), slots, slot_bytes), list(kinds))
        return number

    def add_blocks(self, plan: int, count: int) -> int:
        """Enter so many blocks, absent so far; returns the number of the first."""
        return int(self._call("add_blocks", plan, count))

    def set_blocks(self, plan: int, columns: Columns) -> None:
        """Say, for the first time or anew, where blocks lie. What versions lie in must outlive the plan."""
        files = [(fd, address_of(version), seen) for fd, version, seen in columns.files]
        self._call(
            "set_blocks", plan, columns.blocks, columns.kind, files, columns.file, columns.planes,
            (columns.offsets, columns.lengths, columns.crcs),
        )  # fmt: skip

    def stale_blocks(self, plan: int) -> list[int]:
        """Blocks whose file was given to others."""
        found: list[int] = self._call("stale_blocks", plan)
        return found

    def begin(self, plan: int, layers: tuple[int, int], blocks: Sequence[int] | None = None) -> tuple[int, int]:
        """Queue a pass over layers of all blocks, or of these in this order; its number and how many pieces it has.

        PlanFull where passes or the blocks that they name are too many; ValueError if one of ``blocks`` is absent.
        """
        number, pieces = self._call("begin", plan, layers, blocks)
        return int(number), int(pieces)

    def drop(self, plan: int) -> None:
        """Forget the passes that are queued, and the rest of the one under way; pieces that were begun still land."""
        self._call("drop", plan)

    def retry(self, plan: int) -> None:
        """Do the reads that failed once more, from where their blocks lie now."""
        self._call("retry", plan)

    def fail(self, plan: int, reason: int, block: int) -> None:
        """End a plan for its reader, for a reason; it is still to be closed."""
        self._call("fail", plan, reason, block)

    def close(self, plan: int, reason: int = 0) -> bool:
        """End it: its ring is not written any more. False while a read of its files goes on; DRAINED tells its end."""
        return bool(self._call("close", plan, reason))

    def progress(self, plan: int) -> int:
        """Pieces that the reader gave back, modulo 2**32."""
        return int(self._call("progress", plan))

    def events(self, seconds: float) -> list[Event]:
        """What has happened, waiting for the first for so long."""
        return [
            Event(plan, EventKind(kind), sequence, block, stale)
            for plan, kind, sequence, block, stale in self._engine.events(seconds)
        ]

    def fills(self, plan: int, sequence: int) -> list[Fill]:
        """What a piece wants that no file has."""
        return [Fill(*one) for one in self._call("fills", plan, sequence)]

    def fill(self, plan: int, sequence: int, to: int, data: memoryview) -> bool:
        """Copy one such slice into its place; False if the plan has ended."""
        return bool(self._engine.fill(plan, sequence, to, data))

    def filled(self, plan: int, sequence: int) -> None:
        """All that a piece wanted is there."""
        self._call("filled", plan, sequence)

    def stats(self) -> Stats:
        """Counts."""
        return Stats(*self._engine.stats())

    def _call(self, name: str, plan: int, *arguments: object) -> Any:
        try:
            return getattr(self._engine, name)(plan, *arguments)
        except IndexError as error:
            raise PlanEnded(str(error)) from error
        except OverflowError as error:
            raise PlanFull(str(error)) from error


def decode(coded: bytes | memoryview, size: int, planes: int) -> bytes | None:
    """Decode a slice of ``size`` bytes (``tiers/lossless.py``) as plans do; None if it was not coded from one."""
    found: bytes | None = native.extension().plan_decode(coded, size, planes)
    return found


class Seen(NamedTuple):
    """What a reader finds in a ring: pieces landed (modulo 2**32), whether the plan has ended, why, and for which
    block (NO_BLOCK: none)."""

    landed: int
    ended: int
    reason: int
    block: int


def wait_landed(ring: memoryview, landed: int, seconds: float) -> Seen:
    """Wait until so many pieces have landed, the plan has ended, or the time is over."""
    return Seen(*native.extension().plan_wait(address_of(ring), landed, seconds))


def give_back(ring: memoryview, done: int, bell: int) -> None:
    """Say how many pieces were given back, modulo 2**32, and ring the eventfd ``bell`` if that is waited for."""
    native.extension().plan_done(address_of(ring), done, bell)
