"""The eviction policies that come with the store, and those of one store by tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.core.types import TIERS_MAX, Tier
from kvstore.store.columns.index import BlockIndex
from kvstore.store.columns.native import NativeIndex
from kvstore.store.eviction.contract import Eviction, build, register
from kvstore.store.eviction.lru import LruList
from kvstore.store.eviction.native_lru import NativeLru

DEFAULT: Final = "lru"


def lru(index: BlockIndex, tier: Tier) -> LruList:
    """The LRU list of a tier, kept where the index is."""
    if isinstance(index, NativeIndex) and tier in index.tiers:
        return NativeLru(index, tier)
    return LruList(index, tier)


register(DEFAULT, lru)


def build_all(names: Mapping[Tier, str], index: BlockIndex) -> list[Eviction]:
    """The policies by the tiers' numbers; entry 0 stands for nothing."""
    tiers = [Tier(max(number, 1)) for number in range(TIERS_MAX + 1)]
    return [build(names.get(tier, DEFAULT), index, tier) for tier in tiers]
