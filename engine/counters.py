"""What the engine counts. Each number only grows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from kvstore.core.types import Tier


@dataclass(slots=True)
class Counters:
    """Counts since the engine was made.

    ``tokens_computed``       tokens whose K and V a forward pass made, recomputed ones included
    ``tokens_generated``      tokens drawn
    ``tokens_attended``       context of the tokens drawn, summed over them; ``tokens_attended_int8`` of it lay in int8
                              blocks (whose ``raw_layers`` are raw all the same)
    ``tokens_from``           tokens of prefixes not computed, by the hottest tier that held them; "engine" are those
                              that another request of this engine held at the time
    ``bytes_attended``        bytes of slices that attention read, by the tier that they lay in, "private" being the
                              engine's own pool, "hot" what selected attention had kept of storage; ``cold_wait_s`` is
                              how long steps waited for those from storage
    ``blocks_sealed``         blocks committed; ``blocks_existed`` of them were resident already
    ``blocks_demoted``        blocks moved from DEVICE to HOST to make room
    ``blocks_cooled``         blocks let go to storage, to be read from there layer by layer
    ``blocks_private``        blocks of the engine's own pool taken, since the cache gave none
    ``preemptions``           requests that had to give up their memory
    ``links_lost``            times that the session with the cache ended while in use
    ``steps_discarded``       steps whose results were thrown away since the session ended meanwhile
    """

    steps: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0
    tokens_attended: int = 0
    tokens_attended_int8: int = 0
    tokens_from: dict[str, int] = field(
        default_factory=lambda: {"engine": 0, **{tier.name.lower(): 0 for tier in Tier}}
    )
    bytes_attended: dict[str, int] = field(
        default_factory=lambda: {**{tier.name.lower(): 0 for tier in Tier}, "private": 0, "hot": 0}
    )
    cold_wait_s: float = 0.0
    blocks_sealed: int = 0
    blocks_existed: int = 0
    blocks_demoted: int = 0
    blocks_cooled: int = 0
    blocks_private: int = 0
    preemptions: int = 0
    links_lost: int = 0
    steps_discarded: int = 0

    def as_dict(self) -> dict[str, object]:
        """All counts by name, for printing."""
        return asdict(self)
