"""The life of one copy of a block in one tier, as a table.

::

               RESERVE          SEAL (DEVICE: in place)
    ABSENT ──────────► RESERVED ──────────────────────────┐
      │ ▲  ◄────────────  │  ABORT                        │
      │ │                 │ FILL (HOST: copy of a commit) │
      │ │ FAIL            ▼                               ▼
      │ └───────────── FILLING ───────── SEAL ─────────► READY ──── DROP ──► ABSENT
      └──────── FILL ────►│ (promotion, demotion)         │
                          └── DOOM ──► DOOMED ◄── DOOM ───┘
                                         └── DRAIN ──► ABSENT

A copy is visible in READY alone. DOOMED means: dropped while I/O still reads from or lands in its bytes; they are
given back at DRAIN, when the last I/O has ended. An illegal event raises and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvstore.core.errors import InternalError
from kvstore.core.types import Tier


class CopyState(Enum):
    """Where a copy is in its life."""

    ABSENT = "absent"
    RESERVED = "reserved"
    FILLING = "filling"
    READY = "ready"
    DOOMED = "doomed"

    # Members are single objects; a hash in Python would cost more than the rest of a step.
    __hash__ = object.__hash__


class Event(Enum):
    """What may happen to a copy."""

    RESERVE = "reserve"
    ABORT = "abort"
    FILL = "fill"
    SEAL = "seal"
    FAIL = "fail"
    DROP = "drop"
    DOOM = "doom"
    DRAIN = "drain"

    __hash__ = object.__hash__


TRANSITIONS: Final[dict[tuple[CopyState, Event], CopyState]] = {
    (CopyState.ABSENT, Event.RESERVE): CopyState.RESERVED,
    (CopyState.ABSENT, Event.FILL): CopyState.FILLING,
    (CopyState.RESERVED, Event.ABORT): CopyState.ABSENT,
    (CopyState.RESERVED, Event.FILL): CopyState.FILLING,
    (CopyState.RESERVED, Event.SEAL): CopyState.READY,
    (CopyState.FILLING, Event.SEAL): CopyState.READY,
    (CopyState.FILLING, Event.FAIL): CopyState.ABSENT,
    (CopyState.FILLING, Event.DOOM): CopyState.DOOMED,
    (CopyState.READY, Event.DROP): CopyState.ABSENT,
    (CopyState.READY, Event.DOOM): CopyState.DOOMED,
    (CopyState.DOOMED, Event.DRAIN): CopyState.ABSENT,
}


class IllegalTransition(InternalError):
    """An event that the table does not allow in this state: a bug of the store."""

    def __init__(self, state: CopyState, event: Event) -> None:
        allowed = sorted(e.value for s, e in TRANSITIONS if s is state)
        super().__init__(
            f"event {event.value} in state {state.value}",
            field="event", value=event.value, expected=" or ".join(allowed),
        )  # fmt: skip


def after(state: CopyState, event: Event) -> CopyState:
    """State after ``event``; raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


@dataclass(slots=True)
class Copy:
    """A copy that the index does not hold: reserved, being filled, or doomed. ``place`` is an offset or a handle."""

    tier: Tier
    nbytes: int
    state: CopyState = CopyState.ABSENT
    place: int = -1

    def advance(self, event: Event) -> None:
        """Go to the next state; raises IllegalTransition."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition(self.state, event) from None
