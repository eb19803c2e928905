"""In which order the copies of a tier go: a contract, chosen per tier by name in the configuration.

A policy keeps an order and nothing else. What may go at all is not its affair: it offers slots to a ``Choice``, which
knows pins, leases, I/O, chains and sizes, and says of each whether it is taken. Uses come in batches, before victims
are chosen, so that neither match nor fetch pays for the order. Everything is called with the store's lock held.

A new policy is one class and one ``register``; ``tests/extension/test_eviction_fifo.py`` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Tier
from kvstore.store.columns.index import BlockIndex


class Choice(Protocol):
    """The victims of one call, as far as they are chosen."""

    @property
    def done(self) -> bool:
        """Whether nothing more is to be offered: there is enough, or there can not be."""

    def take(self, slot: int) -> bool:
        """Offer a copy: True if it goes. False now may be True once its children in the tier were taken."""

    @property
    def uncovered(self) -> int:
        """Slot of the parent whose last child in the tier was the copy that was just taken, or NONE."""

    @property
    def may_break(self) -> bool:
        """Whether a chain may lose its oldest blocks where the old leaves are not enough: on SSD, where one chain can
        be longer than the tier. ``take_anyway`` does nothing elsewhere."""

    def take_anyway(self, slots: Iterable[int]) -> None:
        """Offer copies although they have children, coldest first."""


class Eviction(Protocol):
    """The order of one tier. Slots that it was not told of, or that were removed, are ignored by every method."""

    def inserted(self, slot: int) -> None:
        """A copy came to the tier."""

    def used(self, slots: Sequence[int]) -> None:
        """Copies were used, in this order; within one use a chain's blocks come leaf first."""

    def held(self, slot: int) -> None:
        """The copy was pinned: do not offer it until it is released."""

    def released(self, slot: int) -> None:
        """It may go again, and was used until now."""

    def removed(self, slot: int) -> None:
        """The copy is gone."""

    def reconsider(self, slot: int) -> None:
        """A reason for which a choice did not take it may have gone."""

    def reconsider_all(self) -> None:
        """As ``reconsider``, for every copy."""

    def victims(self, choice: Choice) -> None:
        """Offer copies, the first to go first, until the choice is done or none is left. Costs O(offered)."""


Factory = Callable[[BlockIndex, Tier], Eviction]
_POLICIES: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make a policy known under the name that the configuration uses."""
    _POLICIES[name] = factory


def policies() -> tuple[str, ...]:
    """Names that are known."""
    return tuple(sorted(_POLICIES))


def build(name: str, index: BlockIndex, tier: Tier) -> Eviction:
    """The policy of a tier. Raises InvalidArgument for a name that is not known."""
    factory = _POLICIES.get(name)
    if factory is None:
        raise InvalidArgument(f"store.{tier.name.lower()}.eviction", repr(name), " or ".join(policies()))
    return factory(index, tier)
