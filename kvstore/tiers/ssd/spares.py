"""Dead segments: unlinked, or kept as spares that the next segment is made of.

A few are kept because making a file anew costs: removing 192 MiB took 80 ms here (the filesystem discards the
blocks), and the first write into reserved space ran at 75-85 % of a second one (measured on ext4, 4 MiB, depth 8).
A spare is renamed and gets a new head; what it held before names another segment, so nothing takes it for its own.
"""

from __future__ import annotations

from typing import Final

from kvstore.tiers.ssd.commit import Committer
from kvstore.tiers.ssd.core import Core, Segment, log

SPARES_MAX: Final = 2


class Spares:
    """The core's lock guards the list."""

    def __init__(self, core: Core, committer: Committer) -> None:
        self._core = core
        self._committer = committer
        committer.watcher = self

    def before_commit(self) -> list[Segment]:
        """The dead segments whose drops are durable when all that is queued now is. Called by the committer."""
        with self._core.lock:
            return self.dead() if len(self._core.spares) < SPARES_MAX else []

    def after_commit(self, dead: list[Segment]) -> None:
        """All of that is durable: keep as many as are wanted. No I/O, since commits wait for this."""
        for segment in dead:
            with self._core.lock:
                if len(self._core.spares) < SPARES_MAX:
                    self._keep(segment)

    def dead(self) -> list[Segment]:
        """Segments in which nothing lives and nothing is under way. The core's lock is held."""
        segments = self._core.segments.values()
        return [one for one in segments if not one.open and one.blocks == 0 and one.users == 0]

    def collect(self, keep: int = SPARES_MAX) -> int:
        """Turn dead segments into spares, or unlink them, once their drops are durable; returns their bytes."""
        core = self._core
        with core.lock:
            dead = self.dead()
        if dead:
            # Otherwise a crash would find records of blocks whose segment is gone.
            self._committer.settle()
        freed = 0
        for segment in dead:
            with core.lock:
                if self._keep(segment):
                    freed += segment.file_bytes
        while True:
            with core.lock:
                # One of the time of a larger cap is not what the next segment is to be.
                large = [one for one in core.spares if one.file_bytes > 2 * core.config.segment_size]
                if len(core.spares) <= keep and not large:
                    return freed
                segment = large[0] if large else min(core.spares, key=lambda one: one.file_bytes)
                core.spares.remove(segment)
            self.remove(segment)

    def shed(self, nbytes: int = 0, blocks: int = 0, extents: int = 0) -> None:
        """Unlink spares until ``nbytes`` find room beside those that stay, and the index of so many more blocks."""
        core = self._core
        while True:
            with core.lock:
                if not core.spares or core.slack_bytes(blocks, extents) >= nbytes:
                    return
                segment = min(core.spares, key=lambda one: one.file_bytes)
                core.spares.remove(segment)
            self.remove(segment)

    def _keep(self, segment: Segment) -> bool:
        """Turn a dead segment into a spare; False if it is none any more. The core's lock is held."""
        core = self._core
        # While its drops waited a move may have been applied that filled the segment again.
        if segment.blocks or segment.users or core.segments.pop(segment.number, None) is None:
            return False
        core.moved(segment)
        core.spares.append(segment)
        core.counters["segments_freed"] += 1
        return True

    def take(self) -> Segment | None:
        """The largest spare, which is the caller's then. The core's lock is held."""
        spares = self._core.spares
        if not spares:
            return None
        segment = max(spares, key=lambda one: one.file_bytes)
        spares.remove(segment)
        return segment

    def remove(self, segment: Segment) -> None:
        """Unlink a segment that is in no table any more; its name may be gone already."""
        core = self._core
        with core.lock:
            segment.doomed = True
            close = segment.users == 0
        try:
            core.call("unlink", lambda: _unlink(core, segment.name))
        finally:
            with core.lock:
                core.ledger.remove_segment(segment.number)
            if close:
                core.port.close(segment.fd)


def _unlink(core: Core, name: str) -> None:
    try:
        core.port.unlink(name)
    except FileNotFoundError:
        log.warning("%s was removed from outside", name)
