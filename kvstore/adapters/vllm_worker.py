"""The worker's half of the connector for vLLM: blocks go between the engine's own cache and the store.

Nothing here waits, but for the loads that a step's forward needs, and those by their deadline. A save reads the cache
before ``save`` returns, as far as the session's buffer has room; the rest stays in a queue and is stored after a later
step. Until then vLLM keeps the blocks: a request's end is told only when its queue is empty, and a preemption, after
which the blocks are another's, empties it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstore.adapters.vllm_identity import Settings
from kvstore.adapters.vllm_metrics import TieredStats
from kvstore.client import ClientOptions, EngineClient, Pieces, Pointer, Transfer
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import foreign_chain, foreign_key
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey, Outcome

LOG: Final = logging.getLogger("vllm.kvstore")
ROOT: Final = BlockKey(bytes(32))


@dataclass(slots=True)
class Load:
    """Blocks of one request to load: hashes, and vLLM's numbers of where they go."""

    request: str
    digests: list[bytes]
    blocks: list[int]
    later: bool
    """Between steps; else the step's forward needs them."""


@dataclass(slots=True)
class Save:
    """Blocks of one request that a step completes. ``before`` are vLLM's numbers of those before them."""

    request: str
    parent: bytes
    digests: list[bytes]
    blocks: list[int]
    before: list[int]

    def after(self, count: int) -> Save:
        """What is left once the first ``count`` are stored."""
        return Save(
            self.request,
            self.digests[count - 1],
            self.digests[count:],
            self.blocks[count:],
            self.before + self.blocks[:count],
        )


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers of one step."""

    loads: list[Load]
    saves: list[Save]
    preempted: set[str]
    healed: set[int]
    """Blocks that failed to load and that are computed again from this step on."""
    ended: set[str]
    """Requests that have ended, and whose blocks are kept until the workers say that they have read them."""
    number: int = 0
    """Counts the steps."""


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler after a step."""

    number: int
    """Of the step."""
    loaded: set[str]
    """Requests whose load inside of a step has ended."""
    waiting: set[str]
    """Requests with blocks that are still to be read."""

    def aggregate(self, other: Any) -> WorkerMetadata:
        """Together with another worker's of the same step."""
        return WorkerMetadata(min(self.number, other.number), self.loaded | other.loaded, self.waiting | other.waiting)


class Worker:
    """The worker's half. Used by the worker's thread alone."""

    def __init__(self, settings: Settings, spec: NamespaceSpec) -> None:
        self._settings, self._spec = settings, spec
        options = ClientOptions(name="vllm worker", device=False, buffer_bytes=settings.buffer_bytes)
        self._client = EngineClient(settings.socket, options, deadline_s=settings.deadline_s)
        self._namespace = self._client.open_namespace(spec)
        self._client.wait_ready(settings.connect_s)
        self._regions: list[Pointer] = []
        self._loading: dict[str, tuple[Transfer, Load]] = {}
        self._loaded: set[str] = set()
        self._errors: set[int] = set()
        self._bad: set[int] = set()
        """Blocks that failed to load, until the scheduler knows: what is computed from them is not stored."""
        self._queue: deque[Save] = deque()
        self._ending: set[str] = set()
        """Requests that have ended and whose end was not told yet."""
        self._number = 0
        self._news = False
        self._saving: dict[Transfer, int] = {}
        self._stats = TieredStats()

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The engine's cache, a tensor a layer. Raises InvalidArgument for one that is not as the namespace says."""
        size = self._spec.opaque_slice_bytes
        regions = []
        for name, cache in kv_caches.items():
            if cache.device.type != "cpu":
                raise InvalidArgument("kv_caches", f"{name} on {cache.device}", "memory of the CPU backend")
            page = cache.stride(0) * cache.element_size()
            if not cache[0].is_contiguous() or page != size or cache[0].numel() * cache.element_size() != size:
                told = f"{name} of shape {tuple(cache.shape)}, strides {cache.stride()}"
                raise InvalidArgument("kv_caches", told, f"whole blocks of {size} bytes, one after another")
            regions.append(Pointer(cache.data_ptr(), cache.shape[0] * page, cache))
        if len(regions) != self._spec.layers:
            raise InvalidArgument("kv_caches", f"{len(regions)} layers", f"{self._spec.layers} layers")
        self._regions = regions

    def _pieces(self, blocks: list[int]) -> Pieces:
        size = self._spec.opaque_slice_bytes
        return Pieces.of(self._regions, [block * size for block in blocks], size)

    # ------------------------------------------------------------ loads

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Begin the loads of a step; those that its forward needs have ended when it returns."""
        self._bad -= metadata.healed
        self._ending |= metadata.ended
        self._number = metadata.number
        now: list[tuple[Transfer, Load]] = []
        for load in metadata.loads:
            keys = [foreign_key(self._namespace, digest) for digest in load.digests]
            begun = self._client.load(self._namespace, keys, self._pieces(load.blocks), self._settings.load_s), load
            if load.later:
                self._loading[load.request] = begun
            else:
                now.append(begun)
        for transfer, load in now:
            transfer.result()
            self._ended(transfer, load)
            self._loaded.add(load.request)

    def _ended(self, transfer: Transfer, load: Load) -> None:
        bad = {
            block for block, outcome in zip(load.blocks, transfer.outcomes, strict=True) if outcome is not Outcome.HIT
        }
        self._errors |= bad
        self._bad |= bad
        self._stats.count(loaded_blocks=len(load.blocks) - len(bad), load_failures=len(bad))
        if bad:
            reason = next(
                r.name for r, o in zip(transfer.reasons, transfer.outcomes, strict=True) if o is not Outcome.HIT
            )
            LOG.warning(
                "%d of %d blocks were not loaded (%s) and are computed again", len(bad), len(load.blocks), reason
            )

    def take_errors(self) -> set[int]:
        """Blocks that failed to load since the last time."""
        errors, self._errors = self._errors, set()
        return errors

    def told(self) -> WorkerMetadata | None:
        """What the scheduler has to know."""
        if not self._loaded and not self._news:
            return None
        loaded, self._loaded = self._loaded, set()
        waiting = {save.request for save in self._queue}
        self._news = bool(waiting)
        return WorkerMetadata(self._number, loaded, waiting)

    # ------------------------------------------------------------ saves

    def save(self, metadata: StepMetadata) -> None:
        """Store what a step has completed, and what was left of those before."""
        for transfer in self._client.step():
            count = self._saving.pop(transfer, 0)
            if count:
                hits = sum(outcome is Outcome.HIT for outcome in transfer.outcomes)
                self._stats.count(stored_blocks=hits, store_failures=min(count, transfer.taken) - min(hits, count))
        for save in metadata.saves:
            self._news = True
            if self._bad.isdisjoint(save.before) and self._bad.isdisjoint(save.blocks):
                self._queue.append(save)
        while self._queue:
            save = self._queue.popleft()
            parent = foreign_key(self._namespace, save.parent) if save.parent else ROOT
            keys, parents = foreign_chain(self._namespace, save.digests, parent)
            stored = self._client.store(self._namespace, keys, parents, self._pieces(save.blocks))
            if stored.taken:
                self._saving[stored] = stored.taken
            if stored.taken < len(keys):
                if stored.done() and stored.outcomes[stored.taken] is Outcome.MISS:
                    # There will be no room by itself.
                    self._stats.count(store_failures=len(keys) - stored.taken)
                    continue
                self._queue.appendleft(save.after(stored.taken) if stored.taken else save)
                self._stats.count(delayed_stores=1)
                return

    def forget(self, requests: set[str]) -> None:
        """The blocks of these are another's from now on."""
        if requests:
            dropped = [save for save in self._queue if save.request in requests]
            self._stats.count(store_failures=sum(len(save.blocks) for save in dropped))
            self._queue = deque(save for save in self._queue if save.request not in requests)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests that have ended and whose blocks were read, and those whose load between steps has ended."""
        if not self._ending and not self._loading:
            return set(), set()
        sent = self._ending - {save.request for save in self._queue}
        self._ending -= sent
        received = {name for name, (transfer, _) in self._loading.items() if transfer.done()}
        for name in received:
            self._ended(*self._loading.pop(name))
        return sent, received

    def take_stats(self) -> TieredStats | None:
        """What was counted since the last time."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TieredStats()
        return stats
