"""A connector for vLLM: K and V of a prompt's blocks that the store has are loaded, and what is computed is stored.

vLLM loads this file by its name (``kv_connector_module_path``) and makes two objects of it: one in the scheduler, which
looks for blocks and says what each step moves, and one in each worker, which moves it (``vllm_worker.py``). Blocks are
vLLM's own, found by vLLM's own hashes and kept as opaque bytes; ``vllm_identity.py`` says what they are bytes of.

A block is stored once all of its tokens are computed, from the end of the stored prefix on. A load that fails, for
whatever reason, is a block that vLLM computes again (``kv_load_failure_policy=recompute``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvstore.adapters.vllm_identity import Settings, specs_of
from kvstore.adapters.vllm_metrics import TieredMetrics, TieredStats
from kvstore.adapters.vllm_worker import Load, Save, StepMetadata, Worker, WorkerMetadata
from kvstore.client import ClientOptions, EngineClient, Found
from kvstore.core.keys import foreign_key
from kvstore.core.types import NamespaceId, Tier

LOG: Final = logging.getLogger("vllm.kvstore")
"""Below vLLM's own logger, so that its settings show what is logged here."""

SCHEDULER_BUFFER_BYTES: Final = 1 << 20
"""The scheduler moves no bytes; a session that maps memory has a buffer."""


class TieredConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector as vLLM knows it: each call goes to the scheduler's or the worker's half."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(vllm_config)
        specs = specs_of(vllm_config, kv_cache_config, settings)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(settings, specs, self._kv_transfer_config)
        else:
            rank = vllm_config.parallel_config.rank % len(specs)
            self._worker = Worker(settings, specs[rank])

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    # ------------------------------------------------------------ in the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See ``KVConnectorBase_V1``."""
        self._in_worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """See ``KVConnectorBase_V1``. Loads that the step needs have ended when it returns."""
        self._in_worker.begin_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is left to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        """See ``KVConnectorBase_V1``. What finds no room in the session's buffer is stored after a later step."""
        self._in_worker.save(self._get_connector_metadata())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """See ``KVConnectorBase_V1``."""
        self._in_worker.forget(kv_connector_metadata.preempted)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See ``KVConnectorBase_V1``."""
        return self._in_worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See ``KVConnectorBase_V1``."""
        return self._in_worker.take_errors()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """See ``KVConnectorBase_V1``."""
        return self._in_worker.told()

    def get_kv_connector_stats(self) -> TieredStats | None:
        """See ``KVConnectorBase_V1``."""
        return self._worker.take_stats() if self._worker is not None else None

    # ------------------------------------------------------------ in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See ``KVConnectorBase_V1``."""
        return self._in_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See ``KVConnectorBase_V1``."""
        self._in_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See ``KVConnectorBase_V1``."""
        return self._in_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See ``KVConnectorBase_V1``."""
        self._in_scheduler.stepped(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``KVConnectorBase_V1``. Blocks of which some were to be stored are freed later."""
        return self._in_scheduler.finished(request.request_id), None

    # ------------------------------------------------------------ both

    def shutdown(self) -> None:
        """End the session."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredStats:
        """See ``KVConnectorBase_V1``."""
        return TieredStats(data=data) if data is not None else TieredStats()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> TieredMetrics:
        """See ``KVConnectorBase_V1``."""
        return TieredMetrics(vllm_config, metric_types, labelnames, values)

    @property
    def _in_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("this object is a worker's")
        return self._scheduler

    @property
    def _in_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("this object is the scheduler's")
        return self._worker


@dataclass(slots=True)
class _Track:
    """What the scheduler knows of one request."""

    request: Any
    found: Found | None = None
    """What the store had of it; held until it is loaded."""
    blocks: list[int] = field(default_factory=list)
    """vLLM's numbers of its blocks."""
    stored: int = 0
    """Blocks, from the first on, that the store had or that a step was told to store."""
    load: tuple[int, int, bool] | None = None
    """First block, how many, and whether between steps: what the next step is told to load."""
    failed: bool = False
    """A load failed: what is left is computed, so that no request asks for a bad block for ever."""
    saving: int = 0
    """The last step that was told to store something of it, until the workers have read that."""

    def let_go(self) -> None:
        """What the store has of it may go."""
        if self.found is not None:
            self.found.release()
            self.found = None


class Scheduler:
    """The scheduler's half. Used by the scheduler's thread alone."""

    def __init__(self, settings: Settings, specs: list[Any], transfer: Any) -> None:
        self._settings = settings
        self._size = specs[0].block_tokens
        options = ClientOptions(name="vllm scheduler", device=False, buffer_bytes=SCHEDULER_BUFFER_BYTES)
        self._client = EngineClient(settings.socket, options, deadline_s=settings.deadline_s)
        self._namespaces: list[NamespaceId] = [self._client.open_namespace(spec) for spec in specs]
        self._reads, self._writes = transfer.is_kv_consumer, transfer.is_kv_producer
        self._tracks: dict[str, _Track] = {}
        self._loading: dict[str, _Track] = {}
        """Those with a load that the next step is told of."""
        self._healed: set[int] = set()
        """Blocks that failed to load and that the scheduler computes again, for the workers to know."""
        self._ended: set[str] = set()
        """Requests that have ended before the workers had read all that is to be stored of them."""
        self._steps = 0
        self._warned = False
        if not self._client.wait_ready(settings.connect_s):
            LOG.warning("no daemon at %s yet: everything is computed until there is one", settings.socket)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens beyond ``computed`` that can be loaded, and whether between steps. May be asked again and again."""
        track = self._tracks.setdefault(request.request_id, _Track(request))
        track.request = request
        if track.failed:
            return 0, False
        if track.found is None or track.found.lost:
            track.let_go()
            track.found = self._look(request)
            track.stored = track.found.matched
        # One token at least is computed, since its logits are wanted.
        blocks = min(track.found.matched, (request.num_tokens - 1) // self._size)
        first = computed // self._size
        if not self._reads or blocks <= first:
            return 0, False
        later = self._settings.loads == "between" or not track.found.resident(Tier.HOST, first)
        return (blocks - first) * self._size, later and self._settings.loads != "inside"

    def _look(self, request: Any) -> Found:
        digests = request.block_hashes
        keys = [[foreign_key(namespace, bytes(digest)) for digest in digests] for namespace in self._namespaces]
        found = self._client.lookup(self._namespaces, keys, hold=True)
        if not found.matched and found.near and not self._warned:
            self._warned = True
            other = "; ".join(
                f"{near.blocks} blocks that differ in {', '.join(near.fields)}" for near in found.near[:3]
            )
            LOG.warning("nothing of this model fits what is served here: the store has %s", other)
        return found

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """vLLM has made room, for ``external`` tokens that are to be loaded."""
        track = self._tracks.get(request.request_id)
        if track is None:
            return
        track.blocks = list(blocks)
        if external and track.found is not None:
            count = external // self._size
            end = min(track.found.matched, (request.num_tokens - 1) // self._size)
            first = end - count
            later = self._settings.loads == "between" or not track.found.resident(Tier.HOST, first)
            track.load = first, count, later and self._settings.loads != "inside"
            self._loading[request.request_id] = track
        elif request.request_id not in self._loading and track.load is None:
            track.let_go()

    def step(self, output: Any) -> StepMetadata:
        """What the workers are to move in a step."""
        self._steps += 1
        loads = [self._load(name, track) for name, track in self._loading.items()]
        self._loading.clear()
        cached = output.scheduled_cached_reqs
        saves: list[Save] = []
        for new in output.scheduled_new_reqs:
            self._note(new.req_id, new.block_ids, replaced=True)
            saves += self._saves(new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        for name, fresh, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self._note(name, fresh, replaced=name in cached.resumed_req_ids)
            saves += self._saves(name, computed + output.num_scheduled_tokens[name])
        (healed, self._healed), (ended, self._ended) = (self._healed, set()), (self._ended, set())
        return StepMetadata(loads, saves, set(output.preempted_req_ids or ()), healed, ended, self._steps)

    def _load(self, name: str, track: _Track) -> Load:
        first, count, later = track.load or (0, 0, False)
        digests = [bytes(digest) for digest in track.request.block_hashes[first : first + count]]
        return Load(name, digests, track.blocks[first : first + count], later)

    def _note(self, name: str, fresh: Any, *, replaced: bool) -> None:
        track = self._tracks.get(name)
        if track is None or fresh is None:
            return
        track.blocks = list(fresh[0]) if replaced else track.blocks + list(fresh[0])

    def _saves(self, name: str, tokens: int) -> list[Save]:
        """What a step that ends with so many tokens of a request completes."""
        track = self._tracks.get(name)
        if track is None or not self._writes:
            return []
        digests, first = track.request.block_hashes, track.stored
        end = min(tokens // self._size, len(digests), len(track.blocks))
        if end <= first:
            return []
        track.stored, track.saving = end, self._steps
        parent = bytes(digests[first - 1]) if first else b""
        part = [bytes(digest) for digest in digests[first:end]]
        return [Save(name, parent, part, track.blocks[first:end], track.blocks[:first])]

    def stepped(self, output: Any) -> None:
        """The workers' answer to a step."""
        loaded: Iterable[str] = output.finished_recving or ()
        told = output.kv_connector_worker_meta
        if isinstance(told, WorkerMetadata):
            loaded = {*loaded, *told.loaded}
            for name, known in self._tracks.items():
                if known.saving <= told.number and name not in told.waiting:
                    known.saving = 0
        for name in loaded:
            track = self._tracks.get(name)
            if track is not None:
                track.load = None
                track.let_go()
        bad = output.invalid_block_ids
        if bad:
            self._healed |= bad
            for track in self._tracks.values():
                first = next((i for i, block in enumerate(track.blocks) if block in bad), None)
                if first is not None:
                    track.stored, track.failed = min(track.stored, first), True
                    track.let_go()

    def finished(self, name: str) -> bool:
        """A request has ended. True if a worker may still read its blocks."""
        track = self._tracks.pop(name, None)
        self._loading.pop(name, None)
        if track is None:
            return False
        track.let_go()
        if track.saving:
            self._ended.add(name)
        return bool(track.saving)
