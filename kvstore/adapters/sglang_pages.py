"""What SGLang's pages are bytes of, where they lie in its host pools, and the backend's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import numpy as np
import torch

from kvstore.adapters.settings import EngineSettings
from kvstore.adapters.weights import weights_of
from kvstore.client import Pieces, Pointer
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec, canonical_json


class Settings(EngineSettings):
    """What stands under ``kvstore`` in the extra configuration. What is stored finds room within ``load_s``, too."""

    __slots__ = ()

    @classmethod
    def of(cls, given: Mapping[str, Any], config: Any) -> Self:
        """Read them. Raises InvalidArgument for a name that is none, and for what pages can not be shared under."""
        found = cls.read("kvstore", given)
        if getattr(config, "should_split_heads", False):
            told = "heads split between engines of another tensor parallelism"
            raise InvalidArgument("tp_lcm_size", told, "engines of one tensor parallelism, each with pages of its own")
        return found


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one pool: their size, and whether the pool says where they lie."""

    word: str
    pool: Any
    nbytes: int
    as_addresses: bool

    @classmethod
    def of(cls, word: str, pool: Any, *, as_addresses: bool) -> Self:
        """Measure a page. Where a pool knows no addresses, or not in its layout, pages go through flat tensors."""
        if as_addresses:
            with suppress(AttributeError, NotImplementedError, ValueError):
                _, sizes = pool.get_page_buffer_meta(torch.arange(int(pool.page_size)))
                return cls(word, pool, sum(sizes), True)
        page = pool.get_dummy_flat_data_page()
        return cls(word, pool, page.numel() * page.element_size(), False)

    @property
    def tokens(self) -> int:
        """Tokens of a page: indices of a pool are of tokens."""
        return int(getattr(self.pool, "page_size", 1) or 1)

    def fits(self, keys: Sequence[str], indices: Any) -> bool:
        """Whether there is a page of indices for each key."""
        return indices is not None and indices.numel() == len(keys) * self.tokens


def addressed(pages: Pages, indices: torch.Tensor, count: int) -> Pieces:
    """Where ``count`` pages lie: the pool's pieces of each (by layer, by keys and values), cut to one length."""
    begins, sizes = pages.pool.get_page_buffer_meta(indices)
    part = math.gcd(*sizes)
    cut = [begin + at for begin, size in zip(begins, sizes, strict=True) for at in range(0, size, part)]
    return Pieces(np.array(cut, np.int64).reshape(count, -1), part, owners=(pages.pool,))


def flat(tensors: Sequence[torch.Tensor], nbytes: int) -> Pieces:
    """Pages that are contiguous tensors of ``nbytes``."""
    return Pieces.each([Pointer(tensor.data_ptr(), nbytes, tensor) for tensor in tensors], nbytes)


def spec_of(pages: Pages, config: Any, settings: Settings) -> NamespaceSpec:
    """The namespace of a pool's pages on this rank: everything that changes a byte of them is a field.

    Keys and values of a model with latent attention are the same on every rank; a state never is.
    """
    pool, mla = pages.pool, bool(config.is_mla_model) and pages.word != "mamba"
    model = str(config.model_name or "")
    extra = {
        "engine": "sglang",
        "version": _version(),
        "pool": pages.word,
        "kind": type(pool).__name__,
        "format": getattr(pool, "storage_format_tag", None),
        "bytes": "pieces" if pages.as_addresses else "flat",
        "layout": str(getattr(pool, "layout", "")),
        "dtype": str(getattr(pool, "dtype", "")),
        "layers": [int(getattr(pool, name, 0) or 0) for name in ("start_layer", "end_layer", "layer_num")],
        "heads": [int(getattr(pool, name, 0) or 0) for name in ("head_num", "head_dim", "v_head_dim")],
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size],
    }
    return NamespaceSpec(
        model=f"sglang/{model}",
        revision=settings.revision or weights_of(model, None),
        dtype="bytes",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=pages.tokens,
        shard_index=0 if mla else config.tp_rank,
        shard_count=1 if mla else config.tp_size,
        salt=settings.salt.encode(),
        opaque_slice_bytes=pages.nbytes,
        extra=canonical_json(extra),
    )


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""
