"""Blocks leave memory: those of a context that DEVICE and HOST can not hold stay in storage, held and never dropped.

A cold block keeps no place. It is let go only once a copy of it lies in storage, and the hold comes before
the pin goes, so that at no moment anything but this engine's release can drop it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice

from kvstore.core.errors import InternalError, InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, LeaseId, Tier
from kvstore.engine.blocks import Block, Registry
from kvstore.engine.config import EngineConfig
from kvstore.engine.counters import Counters
from kvstore.engine.link import CacheLink

MEMORY_BITS = Tier.DEVICE.bit | Tier.HOST.bit
FLUSH_MS = 30_000


class Cooling:
    """Moves blocks of one engine to storage, and knows how much of HOST the engine may still pin."""

    def __init__(
        self, link: CacheLink, registry: Registry, counters: Counters, spec: NamespaceSpec, config: EngineConfig
    ) -> None:
        self._link = link
        self._registry = registry
        self._counters = counters
        layout, self._tokens = BlockLayout.of(spec), spec.block_tokens
        self._stored_bytes, self._device_bytes = layout.stored_bytes, layout.device_bytes
        self._own_blocks = config.private_bytes // layout.device_bytes
        self._host_share = config.host_share

    @property
    def host_room(self) -> int:
        """Blocks that the engine may still pin in HOST, by its own share of it."""
        share = int(self._host_share * self._link.region(Area.HOST).nbytes) // self._stored_bytes
        return max(0, share - self._registry.count(Area.HOST))

    def fits_own(self, tokens: int) -> bool:
        """Whether the engine's own memory, all of it, can hold a context."""
        return -(-tokens // self._tokens) <= self._own_blocks

    def check_fits(self, tokens: int) -> None:
        """Raise InvalidArgument for a context that neither all tiers together nor the engine's own memory can hold."""
        needed = -(-tokens // self._tokens)
        available = max(self._own_blocks, self._blocks_max() if self._link.up else 0)
        if needed > available:
            size = needed * self._stored_bytes
            raise InvalidArgument(
                "prompt",
                f"{tokens} tokens, {needed} blocks of {size} bytes in all",
                f"at most {available} blocks, as "
                + (
                    "DEVICE, HOST and storage hold"
                    if self._link.up
                    else "the engine's own memory holds without its cache"
                ),
            )

    def _blocks_max(self) -> int:
        """Blocks that all tiers together may hold for one engine."""
        device = self._link.region(Area.DEVICE).nbytes if self._link.reaches(Area.DEVICE) else 0
        host = self._host_share * self._link.region(Area.HOST).nbytes if self._link.reaches(Area.HOST) else 0.0
        return device // self._device_bytes + (int(host) + self._link.storage_bytes) // self._stored_bytes

    def hold(self, keys: Items[BlockKey]) -> int:
        """Hold blocks that lie in storage; returns for how many, from the first on. The others are not held."""
        for begin in range(0, len(keys), BATCH_KEYS_MAX):
            part = keys[begin : begin + BATCH_KEYS_MAX]
            flags = self._link.call(lambda cache, part=part: cache.hold(self._link.held, self._link.namespace, part))  # type: ignore[misc]
            if not all(flags):
                well = list(flags).index(False)
                self._link.release(self._link.held, [k for k, f in zip(part[well:], flags[well:], strict=True) if f])
                return begin + well
        return len(keys)

    def make_room(self, blocks: list[Block]) -> int:
        """Let go of the places of blocks on DEVICE; returns how many went.

        A block on DEVICE is written by way of HOST. Where that is full of what the engine has pinned, some of it goes.
        """
        return self.cool(blocks) or (
            self.cool(list(islice(self._registry.within(Area.HOST), len(blocks)))) and self.cool(blocks)
        )

    def cool(self, blocks: list[Block]) -> int:
        """Let go of the places of blocks on DEVICE or in HOST; returns how many had a copy in storage, and went.

        Where some are not in storage yet, what is in memory only is written first.
        """
        if not blocks:
            return 0
        ready = self._in_storage(blocks)
        if len(ready) < len(blocks):
            self._link.flush(FLUSH_MS)
            ready = self._in_storage(blocks)
        if not ready:
            return 0
        ready = ready[: self.hold([key_of(block) for block in ready])]
        pins: dict[LeaseId, list[BlockKey]] = {}
        for block in ready:
            pins.setdefault(self._link.lease_of(block.moved), []).append(key_of(block))
            self._registry.cool(block)
        for lease, keys in pins.items():
            self._link.release(lease, keys)
        self._counters.blocks_cooled += len(ready)
        return len(ready)

    def _in_storage(self, blocks: list[Block]) -> list[Block]:
        found: list[Block] = []
        for begin in range(0, len(blocks), BATCH_KEYS_MAX):
            part = blocks[begin : begin + BATCH_KEYS_MAX]
            keys = [key_of(block) for block in part]
            result = self._link.call(lambda cache, keys=keys: cache.match(self._link.namespace, keys))  # type: ignore[misc]
            found += [b for b, bits in zip(part, result.residency, strict=False) if bits & ~MEMORY_BITS]
        return found


def key_of(block: Block) -> BlockKey:
    """The key of a block of the registry."""
    if block.key is None:
        raise InternalError("a block without a key is in the registry")
    return block.key


def cold_run(residency: Items[int], room: int) -> tuple[int, bool]:
    """How many leading blocks of a prefix are to be treated alike, and whether they stay in storage.

    Blocks on DEVICE are read there; of the others as many are read in HOST as there is ``room`` for, and those that lie
    nowhere else.
    """
    stays: list[bool] = []
    for bits in residency:
        stays.append(room <= 0 and not bits & Tier.DEVICE.bit and bool(bits & ~MEMORY_BITS))
        room -= not bits & Tier.DEVICE.bit
        if stays[-1] != stays[0]:
            return len(stays) - 1, stays[0]
    return len(stays), bool(stays) and stays[0]


def hottest(bits: int) -> str:
    """Name of the hottest tier of a residency set."""
    return next((tier.name.lower() for tier in Tier if bits & tier.bit), Tier.SSD.name.lower())
