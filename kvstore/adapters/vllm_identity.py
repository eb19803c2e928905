"""What vLLM's blocks are bytes of: the namespace of each shard, and the connector's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import torch
import vllm

from kvstore.adapters.settings import EngineSettings
from kvstore.adapters.weights import weights_of
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec, canonical_json

LOADS: Final = ("auto", "inside", "between")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineSettings):
    """``kv_connector_extra_config``, as vLLM is given it. What is held up is a step."""

    loads: str = "auto"
    """``inside`` of the step, ``between`` steps, or ``auto``: inside where all blocks are in HOST."""

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """Read them. Raises InvalidArgument for a name or value that is none."""
        field = "kv_connector_extra_config"
        found = cls.read(field, vllm_config.kv_transfer_config.kv_connector_extra_config)
        if found.loads not in LOADS:
            raise InvalidArgument(f"{field}.loads", found.loads, f"one of {', '.join(LOADS)}")
        return found


def specs_of(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> list[NamespaceSpec]:
    """The namespace of each tensor-parallel rank, in order; the same in the scheduler and in each worker.

    Raises InvalidArgument for what was never run: pipeline or context parallelism, several groups of caches.
    """
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise InvalidArgument("parallel_config", "pipeline or context parallelism", "tensor parallelism alone")
    if len(kv_cache_config.kv_cache_groups) != 1:
        told = f"{len(kv_cache_config.kv_cache_groups)} groups of KV caches"
        raise InvalidArgument("kv_cache_config", told, "one, of layers with full attention")
    group = kv_cache_config.kv_cache_groups[0]
    one = group.kv_cache_spec
    extra = {
        "engine": "vllm",
        "version": vllm.__version__,
        "spec": type(one).__name__,
        "device": str(vllm_config.device_config.device_type),
        "kv_cache_dtype": cache.cache_dtype,
        "hash": cache.prefix_caching_hash_algo,
        "hash_tokens": one.block_size,
        "packing": _packing(str(vllm_config.device_config.device_type)),
    }
    return [
        NamespaceSpec(
            model=str(model.model),
            revision=settings.revision or weights_of(str(model.model), model.revision),
            dtype=str(one.dtype).removeprefix("torch."),
            layers=len(group.layer_names),
            kv_heads=one.num_kv_heads,
            head_dim=one.head_size,
            block_tokens=one.block_size,
            shard_index=rank,
            shard_count=parallel.tensor_parallel_size,
            salt=settings.salt.encode(),
            opaque_slice_bytes=one.page_size_bytes,
            extra=canonical_json(extra),
        )
        for rank in range(parallel.tensor_parallel_size)
    ]


def _packing(device: str) -> str:
    """How a page is laid out, as far as the processor decides that: the CPU backend packs K for its instructions."""
    if device != "cpu":
        return ""
    amx = bool(torch.cpu._is_amx_tile_supported())
    return "amx" if amx else torch.backends.cpu.get_cpu_capability()
