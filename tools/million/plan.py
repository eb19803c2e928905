"""What is run: lengths, needles, and the sizes of the tiers that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.engine.needle import Haystack, plant_needles

NEEDLES: Final = 10
"""Asked at each length, at even depths."""
CHUNK_TOKENS: Final = 4096
"""Of prefill: a chunk reads what its windows see and nothing else, so its size is memory against calls."""
TURNS: Final = 4
STEPS: Final = 8
"""Decode steps that are timed at each length in each turn; the fastest tells what a step costs."""
RING_BYTES: Final = 64 << 20
"""Of the session's buffer that slices from storage land in."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Lengths of contexts, ascending, and shares of the longest one that DEVICE and HOST may hold."""

    lengths: tuple[int, ...]
    device_share: float = 0.05
    host_share: float = 0.20
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] < 1000 or list(self.lengths) != sorted(set(self.lengths)):
            raise InvalidArgument("lengths", self.lengths, "ascending numbers of tokens from 1,000 on")

    @property
    def longest(self) -> int:
        """Tokens of the last context."""
        return self.lengths[-1]

    def haystacks(self) -> dict[int, Haystack]:
        """By length, its tokens with the needles that are asked there: each is the beginning of the next one."""
        depths = [index / (NEEDLES - 1) for index in range(NEEDLES)]
        taken: dict[int, int] = {}
        places: dict[int, list[int]] = {}
        for length in self.lengths:
            wanted = [1 + round(depth * (length - 3)) for depth in depths]
            # Where two lengths would have needles side by side they share one.
            places[length] = [
                taken.get(place) or taken.get(place - 1) or taken.get(place + 1, place) for place in wanted
            ]
            taken.update((place, place) for place in places[length])
        whole = plant_needles(self.longest, [place for found in places.values() for place in found], self.seed)
        found = {}
        for length in self.lengths:
            keys = [whole.tokens[place] for place in places[length]]
            found[length] = Haystack(whole.tokens[:length], {key: whole.answers[key] for key in keys})
        return found

    def tiers(self, spec: NamespaceSpec) -> dict[str, int]:
        """Bytes of the daemon's tiers: shares of those that the longest context takes there."""
        layout, blocks = BlockLayout.of(spec), -(-self.longest // spec.block_tokens)
        return {
            "device": max(8, int(self.device_share * blocks)) * layout.device_bytes,
            "host": max(32, int(self.host_share * blocks)) * layout.stored_bytes,
            # Segments that are being filled and those that are rewritten take room beside the blocks.
            "ssd": 2 * blocks * layout.stored_bytes + (1 << 30),
        }

    def buffer_bytes(self, spec: NamespaceSpec) -> int:
        """Of the session: what is filled and what is read have one half each."""
        filling = (CHUNK_TOKENS // spec.block_tokens + 2) * BlockLayout.of(spec).device_bytes
        return 2 * max(filling, RING_BYTES)
