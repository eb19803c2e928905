"""What recovery met on its way, and what it does about damage."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd.core import Segment, log


@dataclass(slots=True)
class Findings:
    """Counts for the report; ``salvage`` is set when the checkpoint is lost and segments must speak for themselves."""

    strict: bool
    cut_bytes: int = 0
    quarantined: int = 0
    orphans_removed: int = 0
    salvage: bool = False
    damage: list[str] = field(default_factory=list)
    shrunk: bool = False
    """What is there exceeds the cap."""
    over_cap: list[Segment] = field(default_factory=list)
    """Segments in which nothing lives any more, to be unlinked once a checkpoint says so."""

    def damaged(self, what: str) -> None:
        """Damage that no crash explains: refused in strict mode, logged in normal mode."""
        if self.strict:
            raise TierUnavailable(f"recovery in strict mode: {what}; start in normal mode to set it aside")
        log.error("recovery: %s", what)
        self.damage.append(what)
