"""Places in the session's buffer that stay reserved from one put to the next, so that a put is one call.

A place is *out* while a put writes to it or the daemon copies from it, else it lies here. Both clients use this; it
does no I/O. What it hands back to be aborted is the caller's to abort.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from kvstore.cache import CommitResult, ReserveResult
from kvstore.client.state import GENERATION_SHIFT
from kvstore.core.types import NamespaceId, Place, Reason, ReservationId


class Standing(NamedTuple):
    """One place and the id that commits it. An older daemon's place does not stand: it is good for one commit."""

    reservation_id: ReservationId
    place: Place
    stands: bool = True


_ID: Final[Callable[[Standing], ReservationId]] = attrgetter("reservation_id")
_STANDS: Final[Callable[[Standing], bool]] = attrgetter("stands")

Out = dict[ReservationId, Standing]
"""Places that one put uses now."""


class StandingPlaces:
    """The idle places of one client, all of one connection and one namespace. The lock guards every field."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._namespace = NamespaceId(b"")
        self._idle: list[Standing] = []
        self._doubtful: list[ReservationId] = []

    def take(self, generation: int, namespace_id: NamespaceId, count: int) -> list[Standing]:
        """As many as ``count`` places of this connection; those of another one are gone and forgotten."""
        with self._lock:
            if generation != self._generation:
                self._generation = generation
                self._idle.clear()
                self._doubtful.clear()
            if namespace_id != self._namespace:
                return []
            taken, self._idle = self._idle[:count], self._idle[count:]
            return taken

    def settle(
        self, namespace_id: NamespaceId, places: Sequence[Standing], committed: CommitResult, keep: int
    ) -> list[ReservationId]:
        """The commit of these places has ended: they are idle again, ``keep`` of all at most. Returns ids to abort.

        Those of another namespace go first: what is idle here is missing where cold reads land.
        """
        with self._lock:
            if not places or places[0].reservation_id >> GENERATION_SHIFT != self._generation:
                return []
            if Reason.DROPPED in committed.reasons:
                # No answer: the daemon may still copy from them.
                self._doubtful += map(_ID, places)
                return []
            surplus: list[Standing] = []
            if namespace_id != self._namespace:
                surplus, self._idle, self._namespace = self._idle, [], namespace_id
            self._idle += filter(_STANDS, places)
            surplus += self._idle[keep:]
            del self._idle[keep:]
            return list(map(_ID, surplus))

    def spare(self, namespace_id: NamespaceId) -> list[ReservationId]:
        """Ids that a put in this namespace may have aborted when it finds no room: they are no longer here."""
        with self._lock:
            found, self._doubtful = self._doubtful, []
            if namespace_id != self._namespace:
                found += [place.reservation_id for place in self._idle]
                self._idle = []
            return found


def answered(reserved: ReserveResult) -> list[Standing]:
    """The places of a Reserve's answer."""
    pairs = zip(reserved.reservation_ids, reserved.places, strict=True)
    return [Standing(number, place, reserved.standing) for number, place in pairs if number and place is not None]


def take_out(out: Out, places: Sequence[Standing]) -> None:
    """Enter a put's places in ``out``."""
    for place in places:
        out[place.reservation_id] = place
