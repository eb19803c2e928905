"""What a killed daemon had told of its copies: every one that came to a tier or left it, and why.

At level debug the store names each copy in its log (logger ``kvstore.store.trace``) while it holds its lock, so before
it answers anybody and before the drop of a copy can reach the disk. What a process has written to a file outlives its
kill. So the log is exact: a block that is gone from SSD without a line that says so was lost. Positions in the
log order what the daemon did against what its clients saw.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.core.types import KEY_BYTES, BlockKey, Reason, Tier

MARK: Final = b" DEBUG kvstore.store.trace: "
ERROR: Final = b" ERROR "
INCOMPLETE: Final = b": a flush was not complete: "
"""In the store's log: blocks were left behind, as the asker was told."""
CAUSES: Final = frozenset(reason.name for reason in Reason)


@dataclass(frozen=True, slots=True)
class Drop:
    """A block left SSD, or memory before it was there; ``at`` is the line's position in the log."""

    at: int
    cause: Reason


@dataclass(slots=True)
class Trace:
    """Follows one log through all lives of the daemon."""

    path: Path
    drops: dict[BlockKey, Drop] = field(default_factory=dict)
    """The last one of each block."""
    removals: Counter[BlockKey] = field(default_factory=Counter)
    """How often a block went since somebody asked."""
    evictions: int = 0
    """Copies that left SSD for space."""
    incomplete: int = 0
    """Flushes that left blocks behind, those of an orderly end included."""
    errors: list[str] = field(default_factory=list)
    """Lines of level error, not yet taken."""
    _read: int = 0

    @property
    def end(self) -> int:
        """Length of the log now: whatever happens from now on is told behind it."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> None:
        """Take the whole lines that came since."""
        if not self.path.exists():
            return
        with self.path.open("rb") as log:
            log.seek(self._read)
            lines = log.read().split(b"\n")
        for line in lines[:-1]:
            if MARK in line:
                # Behind what was done may stand the request that asked for it, in brackets.
                done = line.partition(MARK)[2].partition(b" [")[0]
                self._take(done.decode().split(), self._read)
            elif ERROR in line:
                self.errors.append(line.decode(errors="replace"))
            self.incomplete += INCOMPLETE in line
            self._read += len(line) + 1

    def end_of_life(self) -> None:
        """The daemon was killed. A line that the kill cut in two was of no effect, and must not spoil the next."""
        with self.path.open("ab") as log:
            log.write(b"\n")
        self.read()

    def _take(self, words: list[str], at: int) -> None:
        on_ssd, gone = words[:2] == ["dropped", Tier.SSD.name], words[:1] == ["gone"]
        if len(words) < 3 or not (on_ssd or gone) or len(words[-2]) != 2 * KEY_BYTES or words[-1] not in CAUSES:
            return
        key, cause = BlockKey(bytes.fromhex(words[-2])), Reason[words[-1]]
        self.drops[key] = Drop(at, cause)
        self.removals[key] += gone and cause is Reason.REMOVED
        self.evictions += on_ssd and cause is Reason.EVICTED
