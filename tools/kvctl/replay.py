"""A trace of requests through tiers of given sizes, without a byte of payload: how many blocks would have been hits.

The eviction policies are the daemon's own objects. What is simpler than there: blocks have one size, a request takes no
time and pins nothing, all of its blocks come to the hottest tier and are written through to SSD at once.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, Tier
from kvstore.store.columns.index import NONE, BlockIndex
from kvstore.store.eviction import contract
from kvstore.store.eviction import policies as _registered  # noqa: F401 - the daemon's policies register themselves

RATIO_DIGITS: Final = 4


@dataclass(slots=True)
class Replayed:
    """Blocks of all requests; of these found by hottest tier, and those that no size could find: asked for first."""

    requests: int = 0
    blocks: int = 0
    found: Counter[Tier] = field(default_factory=Counter)
    first: int = 0
    evicted: Counter[Tier] = field(default_factory=Counter)

    @property
    def hits(self) -> int:
        """Found on any tier."""
        return self.found.total()


class Replay:
    """Tiers of ``sizes`` blocks each, hot to cold, all under one policy."""

    def __init__(self, sizes: Mapping[Tier, int], policy: str) -> None:
        self._sizes = {tier: blocks for tier, blocks in sorted(sizes.items()) if blocks}
        if not self._sizes:
            raise InvalidArgument("--host", "no tier has a block", "one tier with room for a block at least")
        self._index = BlockIndex(tuple(self._sizes))
        self._policies = {tier: contract.build(policy, self._index, tier) for tier in self._sizes}
        self._used: Counter[Tier] = Counter()
        self._seen: set[int] = set()
        self._tick = 0
        self.busy: set[int] = set()
        self.result = Replayed()

    def request(self, ids: Sequence[int]) -> None:
        """One request: the longest run from its start that lies somewhere is found, then all of it is here."""
        index, result = self._index, self.result
        keys = [BlockKey(number.to_bytes(32, "big")) for number in ids]
        slots = [index.find(0, key) for key in keys]
        for slot in slots:
            if slot == NONE or not index.residency[slot]:
                break
            result.found[_hottest(index.residency[slot])] += 1
        result.requests += 1
        result.blocks += len(ids)
        result.first += sum(number not in self._seen for number in ids)
        self._seen.update(ids)
        self._tick += 1
        chain = self._slots(keys)
        self.busy = set(chain)
        for tier in (next(iter(self._sizes)), *([Tier.SSD] if Tier.SSD in self._sizes else [])):
            self._come(tier, chain)
        index.note(chain, self._tick)
        for policy in self._policies.values():
            policy.used(list(reversed(chain)))
        self.busy = set()

    def _slots(self, keys: Iterable[BlockKey]) -> list[int]:
        index, parent, found = self._index, NONE, []
        for depth, key in enumerate(keys):
            slot = index.find(0, key)
            if slot == NONE:
                slot = index.add(key, parent, 0, depth)
            found.append(slot)
            parent = slot
        return found

    def _come(self, tier: Tier, chain: Sequence[int]) -> None:
        """Bring what is missing to a tier, parents first, as far as there is room for it."""
        index = self._index
        missing = [slot for slot in chain if not index.residency[slot] & tier.bit]
        over = self._used[tier] + len(missing) - self._sizes[tier]
        if over > 0:
            self._policies[tier].victims(_Choice(self, tier, over))
        for slot in missing[: self._sizes[tier] - self._used[tier]]:
            index.residency[slot] |= tier.bit
            self._used[tier] += 1
            if index.parent[slot] >= 0:
                index.kids[tier][index.parent[slot]] += 1
            self._policies[tier].inserted(slot)

    def go(self, tier: Tier, slot: int) -> None:
        """A copy leaves its tier."""
        index = self._index
        index.residency[slot] &= ~tier.bit & 0xFF
        self._used[tier] -= 1
        self.result.evicted[tier] += 1
        parent = index.parent[slot]
        if parent >= 0:
            index.kids[tier][parent] -= 1
            if not index.kids[tier][parent]:
                self._policies[tier].reconsider(parent)
        self._policies[tier].removed(slot)

    @property
    def index(self) -> BlockIndex:
        """The blocks."""
        return self._index


class _Choice:
    """So many copies have to go; meets ``contract.Choice``."""

    def __init__(self, replay: Replay, tier: Tier, wanted: int) -> None:
        self._replay, self._tier, self._wanted = replay, tier, wanted
        self.uncovered = NONE

    @property
    def done(self) -> bool:
        """Whether enough have gone."""
        return self._wanted <= 0

    @property
    def may_break(self) -> bool:
        """A chain can be longer than SSD."""
        return self._tier is Tier.SSD

    def take(self, slot: int) -> bool:
        """Leaves first, and nothing of the request that the room is for."""
        index = self._replay.index
        if self.done or slot in self._replay.busy or index.kids[self._tier][slot]:
            return False
        self._go(slot)
        return True

    def take_anyway(self, slots: Iterable[int]) -> None:
        """Blocks whose children stay."""
        for slot in slots:
            if self.may_break and not self.done and slot not in self._replay.busy:
                self._go(slot)

    def _go(self, slot: int) -> None:
        index, parent = self._replay.index, self._replay.index.parent[slot]
        self._replay.go(self._tier, slot)
        self.uncovered = parent if parent >= 0 and not index.kids[self._tier][parent] else NONE
        self._wanted -= 1


def _hottest(bits: int) -> Tier:
    return Tier((bits & -bits).bit_length())


def read_trace(path: str) -> Iterator[list[int]]:
    """Prefix ids of the requests of a trace, in their order. JSON lines, gzipped or not, of two forms:
    ``{"hash_ids": [...]}`` a request, with ids for all of the trace; or a session a line,
    ``{"requests": [{"hash_rle": [[first, count], ...]}, ...]}``, whose ids are the session's own and which may nest.

    InvalidArgument names the line that is none.
    """
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as lines:
        numbers: dict[tuple[int, int], int] = {}
        for at, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                if "hash_ids" in found:
                    yield [numbers.setdefault((0, int(one)), len(numbers)) for one in found["hash_ids"]]
                else:
                    for ids in _session(found["requests"]):
                        yield [numbers.setdefault((at, one), len(numbers)) for one in ids]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgument("FILE", f"line {at}", "a request with hash_ids, or a session") from error


def _session(requests: Iterable[Mapping[str, Any]]) -> Iterator[list[int]]:
    for request in requests:
        if "hash_rle" in request:
            yield [one for first, count in request["hash_rle"] for one in range(first, first + count)]
        yield from _session(request.get("requests", ()))
