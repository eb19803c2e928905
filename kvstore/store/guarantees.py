"""Bytes that a tenant keeps on a tier whatever others store. Guarded by the store's lock.

A tenant is the salt of its namespaces, "-" for none. Counting is O(1) a copy, and only for tenants with a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.sizes import parse_size
from kvstore.core.types import TIERS_MAX, Tier

FORM: Final = 'TENANT, host or ssd, and BYTES, such as "team-a host 64 MiB"'


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise: eviction leaves the tenant ``nbytes`` on the tier."""

    tenant: str
    tier: Tier
    nbytes: int

    @classmethod
    def parse(cls, text: str) -> Guarantee:
        """Raises InvalidArgument for anything but ``FORM``."""
        words = text.split(maxsplit=2)
        tier = {"host": Tier.HOST, "ssd": Tier.SSD}.get(words[1]) if len(words) == 3 else None
        try:
            nbytes = parse_size(words[2]) if tier is not None else 0
        except ValueError:
            nbytes = 0
        if tier is None or nbytes <= 0:
            raise InvalidArgument("guarantees", repr(text), FORM)
        return cls(words[0], tier, nbytes)


def parse_all(texts: Sequence[str], room: dict[Tier, int]) -> tuple[Guarantee, ...]:
    """Promises that fit together into ``room``, the bytes of each tier that may be promised. Raises InvalidArgument."""
    found = tuple(map(Guarantee.parse, texts))
    if len({(each.tenant, each.tier) for each in found}) < len(found):
        raise InvalidArgument("guarantees", repr(list(texts)), "one entry for each tenant and tier")
    for tier, most in room.items():
        total = sum(each.nbytes for each in found if each.tier is tier)
        if total > most:
            expected = f"at most {most}, the tier's size times low_watermark"
            raise InvalidArgument("guarantees", f"{total} bytes of {tier.name} together", expected)
    return found


class Share:
    """What one tenant was promised and has, by tier, in bytes."""

    def __init__(self) -> None:
        self.guaranteed = [0] * (TIERS_MAX + 1)
        self.bytes = [0] * (TIERS_MAX + 1)
        self._kept: tuple[dict[int, None], ...] = tuple({} for _ in range(TIERS_MAX + 1))

    def keeps(self, tier: Tier, nbytes: int) -> bool:
        """Whether the tenant would have less than its guarantee if ``nbytes`` went."""
        guaranteed = self.guaranteed[tier]
        return guaranteed > 0 and self.bytes[tier] - nbytes < guaranteed

    def refused(self, slot: int, tier: Tier) -> None:
        """A copy was not taken for the guarantee's sake, and the policy has set it aside."""
        self._kept[tier][slot] = None

    def arrived(self, reconsider: Callable[[int], None], tier: Tier) -> None:
        """A copy came: one that was refused may go in its stead, the one refused first, so that a tenant above its
        guarantee loses its oldest."""
        slot = next(iter(self._kept[tier]), None)
        if slot is not None:
            del self._kept[tier][slot]
            reconsider(slot)


def shares(guarantees: Iterable[Guarantee]) -> dict[str, Share]:
    """A share for each tenant that has a promise."""
    found: dict[str, Share] = {}
    for each in guarantees:
        found.setdefault(each.tenant, Share()).guaranteed[each.tier] = each.nbytes
    return found
