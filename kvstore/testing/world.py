"""A store with one session and a namespace of small blocks: put and get by token, with bytes that follow from keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.cache import CommitEntry, CommitResult, FetchResult
from kvstore.core.clock import ManualClock
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    ROOT_PARENT,
    BlockKey,
    Codec,
    Durability,
    LeaseId,
    Outcome,
    Place,
    Target,
    Tier,
    WritePolicy,
)
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.embedded import build_store
from kvstore.store.session import Session
from kvstore.tiers.base import DiskTier

SPEC = NamespaceSpec(model="world", dtype="float16", layers=3, kv_heads=1, head_dim=8, block_tokens=8)
"""Slices of 256 bytes at distances of 512; a stored block has 8,192 bytes, a block on DEVICE 4,096."""

STORED = 8192
ON_DEVICE = 4096


class World:
    """One store, one session, one namespace. With no threads (the default) work waits for ``run``.

    Without a ``config`` nothing is reclaimed but on demand.
    """

    def __init__(  # noqa: PLR0913  each has a default
        self,
        *,
        host_blocks: int = 64,
        device_blocks: int = 16,
        disk: DiskTier | None = None,
        colder: Sequence[DiskTier] = (),
        threads: int = 0,
        write: WritePolicy = WritePolicy.THROUGH,
        config: StoreConfig | None = None,
        buffer_bytes: int = 1 << 20,
        spec: NamespaceSpec = SPEC,
    ) -> None:
        self.clock = ManualClock()
        self.disk = disk
        full = Watermarks(high=1.0, low=1.0)
        given = config or StoreConfig(device=full, host=full, ssd=full)
        self.config = replace(given, loader_threads=threads, writer_threads=threads, index_map=True)
        self.store = build_store(
            self.config,
            host_bytes=host_blocks * STORED,
            device_bytes=device_blocks * ON_DEVICE,
            disk=disk,
            colder=colder,
            clock=self.clock,
        )
        self.cache = self.store.open_session("world", buffer_bytes=buffer_bytes)
        opened = self.cache.open_namespace(spec, policy=NamespacePolicy(write=write))
        self.namespace_id = opened.namespace_id
        self.layout, self.tokens = opened.layout, spec.block_tokens

    def session(self, name: str, *, buffer_bytes: int = 0) -> Session:
        """One session more, which has opened the namespace, too."""
        session = self.store.open_session(name, buffer_bytes=buffer_bytes)
        session.open_namespace(SPEC)
        return session

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def run(self) -> None:
        """Do what waits for a mover."""
        self.store.run_pending()

    # -- keys and bytes ------------------------------------------------------------------------------------------

    def chain(self, seed: int, blocks: int) -> list[BlockKey]:
        """Keys of a chain that begins with the token ``seed``."""
        return chain_keys(self.namespace_id, [seed] + [7] * (blocks * self.tokens - 1), self.tokens)

    def write(self, memory: memoryview, place: Place, key: BlockKey) -> None:
        """Write the block's slices."""
        for layer in range(SPEC.layers):
            begin = place.offset + layer * place.stride
            memory[begin : begin + self.layout.raw_slice_bytes] = slice_of(key, layer)

    def read(self, cache: Session, place: Place, key: BlockKey, layers: tuple[int, int] | None = None) -> bool:
        """Whether the bytes at a place are the block's."""
        memory = cache.memory(place.area)
        begin, end = layers or (0, SPEC.layers)
        for row, layer in enumerate(range(begin, end)):
            at = place.offset + row * place.stride
            if memory[at : at + self.layout.raw_slice_bytes] != slice_of(key, layer):
                return False
        return place.codec is Codec.RAW

    # -- whole verbs ---------------------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[BlockKey],
        *,
        parent: BlockKey = ROOT_PARENT,
        tier: Tier = Tier.HOST,
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """Reserve, write and commit a chain; keys that are resident, and durable if that is asked, are left out."""
        reserved = self.cache.reserve(self.namespace_id, tier, keys=keys, durability=durability)
        entries = []
        for key, above, number, place in zip(
            keys, parents_of(keys, parent), reserved.reservation_ids, reserved.places, strict=True
        ):
            if place is not None:
                self.write(self.cache.memory(place.area), place, key)
                entries.append(CommitEntry(number, key, above))
        return self.cache.commit(self.namespace_id, entries, durability=durability, lease_id=lease_id)

    def residency(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """Residency of each key of a chain, as far as it matches."""
        return self.cache.match(self.namespace_id, keys).residency

    def fetch(self, keys: Sequence[BlockKey], target: Target = Target.IN_PLACE, ttl_ms: int = 60_000) -> FetchResult:
        """Fetch under a new lease, the job done if there is one; checks the bytes of every hit."""
        lease = self.cache.grant_lease("fetch", ttl_ms)
        found = self.cache.fetch(self.namespace_id, keys, target, lease_id=lease)
        if found.job_id:
            self.run()
            found = self.cache.wait_job(found.job_id, 10_000)
        for key, outcome, place in zip(keys, found.outcomes, found.places, strict=True):
            if outcome is Outcome.HIT and not (place is not None and self.read(self.cache, place, key)):
                raise ValueError(f"wrong bytes for {key.hex()} at {place}")
        return found


def slice_of(key: BlockKey, layer: int) -> bytes:
    """The 256 bytes of a block's slice."""
    return bytes(b ^ layer for b in key) * 8
