"""Which blocks an engine's stores copy now, so that each is copied once."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.transfers import Transfer
from kvstore.core.types import BlockKey, NamespaceId, Outcome, Reason

Outcomes = dict[int, tuple[Outcome, Reason]]
"""What became of keys, by their place in a transfer."""


class Storing:
    """The keys under way. Its table is changed by one step of the interpreter at a time, so that it needs no lock."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[NamespaceId, BlockKey], Transfer] = {}

    @property
    def count(self) -> int:
        """Keys under way."""
        return len(self._by_key)

    def begin(self, transfer: Transfer) -> list[int]:
        """The first place of each key that no other store copies now; it is this one's until its end."""
        fresh: dict[BlockKey, int] = {}
        for i, key in enumerate(transfer.keys):
            other = self._by_key.setdefault((transfer.namespace_id, key), transfer)
            if other is transfer:
                fresh.setdefault(key, i)
            else:
                transfer.elsewhere[key] = other
        return list(fresh.values())

    def forget(self, transfer: Transfer, keys: Sequence[BlockKey]) -> None:
        """A store copies these keys no longer: the next one that has them does."""
        for key in keys:
            if self._by_key.get((transfer.namespace_id, key)) is transfer:
                del self._by_key[transfer.namespace_id, key]

    def end(self, transfer: Transfer, outcomes: Outcomes, fresh: Sequence[int]) -> list[tuple[Outcome, Reason]]:
        """What became of all keys of a store whose ``fresh`` ones came out so; the others were copied elsewhere."""
        lost = (Outcome.MISS, Reason.TIER_UNAVAILABLE)
        known = {transfer.keys[i]: outcomes.get(i, lost) for i in fresh}
        for key, other in transfer.elsewhere.items():
            at = list(other.keys).index(key)
            known[key] = (other.outcomes[at], other.reasons[at]) if other.done() else lost
        self.forget(transfer, transfer.keys)
        return [known[key] for key in transfer.keys]
