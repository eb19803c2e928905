"""SGLang's third cache level: pages of its host memory are kept by ``kvstored``, found by SGLang's own hashes.

SGLang loads this file by its name (``--hicache-storage-backend dynamic``) and calls it from threads of its cache
controller, which may wait. Every pool (keys and values, states, indexers) has namespaces of its own, whose pages are
opaque bytes; ``sglang_pages.py`` says what they are bytes of and where they lie. No failure of the daemon raises: what
can not be moved is told as False, and SGLang computes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvstore.adapters.sglang_pages import Pages, Settings, addressed, flat, spec_of
from kvstore.client import ClientOptions, EngineClient, Pieces
from kvstore.core.keys import foreign_key
from kvstore.core.types import ROOT_PARENT, BlockKey, NamespaceId, Outcome

log = logging.getLogger("kvstore.sglang")

RETRY_S = 0.01
"""Pause before pages are offered again for which there was no room."""


class TieredStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """The backend. Settings stand under ``kvstore`` in ``--hicache-storage-backend-extra-config``.

    Raises InvalidArgument for settings that are wrong and for heads that are split between ranks of unequal number,
    which would need other bytes. Thread-safe.
    """

    def __init__(self, storage_config: Any, _more: Any = None) -> None:
        self._config = storage_config
        extra = storage_config.extra_config or {}
        self._settings = Settings.of(extra.get("kvstore") or {}, storage_config)
        self._addressed = bool(extra.get("interface_v1", 0))
        options = ClientOptions(name="sglang", device=False, buffer_bytes=self._settings.buffer_bytes)
        self._client = EngineClient(self._settings.socket, options, deadline_s=self._settings.deadline_s)
        self._namespaces: dict[Pages, NamespaceId] = {}
        self._pools: dict[str, Pages] = {}
        if not self._client.wait_ready(self._settings.connect_s):
            log.warning("no daemon at %s: all pages are computed until there is one", self._settings.socket)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools["kv"] = Pages.of("kv", mem_pool_host, as_addresses=self._addressed)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        word = _word(host_pool_name)
        self._pools.setdefault(word, Pages.of(word, host_pool, as_addresses=self._addressed or word != "kv"))

    # ------------------------------------------------------------ pages of the pool of keys and values

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages are there, from the first on."""
        pages = self._pages("kv")
        return 0 if pages is None else self._run(pages, keys)

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages to where the host pool has them, without a copy between."""
        return self._load_pool("kv", keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages from where the host pool has them. True where a page is stored now."""
        return self._store_pool("kv", keys, host_indices, extra_info)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read one page into a contiguous tensor of its size."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into contiguous tensors, all of one size. None for what is not there."""
        targets: list[torch.Tensor] = list(target_locations or ())
        nbytes = _one_size(targets, len(keys))
        if nbytes == 0:
            return [None] * len(keys)
        done = self._load(self._of_bytes(nbytes), keys, flat(targets, nbytes))
        return [target if there else None for target, there in zip(targets, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page from a tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages from tensors, all of one size. Whether all of them are stored."""
        sources = [value.contiguous() for value in values or ()]
        nbytes = _one_size(sources, len(keys))
        return nbytes > 0 and all(self._store(self._of_bytes(nbytes), keys, flat(sources, nbytes), None))

    # ------------------------------------------------------------ pages of any pool

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Which prefixes can be restored: keys and values, and of each other pool what its policy asks for."""
        run = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: run} if run else {}
        restorable = set(range(1, run + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            pages = self._pages(_word(transfer.name))
            there = [False] * run if pages is None else self._each(pages, keys[:run])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                whole = set(range(1, len(list(takewhile(bool, there))) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()))
                whole = {end for end in range(1, run + 1) if all(there[max(0, end - last) : end])}
            else:
                raise ValueError(f"Unsupported pool hit policy: {transfer.hit_policy}")
            if whole:
                hits[transfer.name] = max(whole)
            restorable &= whole
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of pools."""
        return {one.name: self._load_pool(_word(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of pools."""
        return {
            one.name: self._store_pool(_word(one.name), one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    # ------------------------------------------------------------ the rest of the interface

    def clear(self) -> bool:
        """Nothing: what this engine stored is others' as well. An operator drops it with ``kvctl forget``."""
        log.warning("pages stay in kvstored, which other engines share; kvctl forget drops a namespace")
        return False

    def close(self) -> None:
        """End the session. Idempotent."""
        self._client.close()

    # ------------------------------------------------------------ moving

    def _pages(self, name: str) -> Pages | None:
        """A pool's pages; None for a pool that was never registered."""
        pages = self._pools.get(name)
        if pages is None:
            log.error("the pool %s was not registered: its pages are not kept", name)
        return pages

    def _of_bytes(self, nbytes: int) -> NamespaceId:
        """The namespace of flat pages of keys and values."""
        known = self._pools.get("kv")
        return self._open(Pages("kv", None if known is None else known.pool, nbytes, as_addresses=False))

    def _open(self, pages: Pages) -> NamespaceId:
        if pages not in self._namespaces:
            self._namespaces[pages] = self._client.open_namespace(spec_of(pages, self._config, self._settings))
        return self._namespaces[pages]

    def _run(self, pages: Pages, keys: Sequence[str]) -> int:
        namespace = self._open(pages)
        return self._client.lookup([namespace], [_keys(namespace, keys)]).matched

    def _each(self, pages: Pages, keys: Sequence[str]) -> list[bool]:
        namespace = self._open(pages)
        return [outcome is Outcome.HIT for outcome in self._client.find(namespace, _keys(namespace, keys)).result()]

    def _load_pool(self, name: str, keys: list[str], indices: Any) -> list[bool]:
        pages = self._pages(name)
        if pages is None or not pages.fits(keys, indices):
            return [False] * len(keys)
        if pages.as_addresses:
            return self._load(self._open(pages), keys, addressed(pages, indices, len(keys)))
        targets = [pages.pool.get_dummy_flat_data_page() for _ in keys]
        done = self._load(self._open(pages), keys, flat(targets, pages.nbytes))
        for number, there in enumerate(done):
            if there:
                pages.pool.set_from_flat_data_page(int(indices[number * pages.tokens]), targets[number])
        return done

    def _store_pool(self, name: str, keys: list[str], indices: Any, extra_info: Any) -> list[bool]:
        pages = self._pages(name)
        if pages is None or not pages.fits(keys, indices):
            return [False] * len(keys)
        if pages.as_addresses:
            source = addressed(pages, indices, len(keys))
        else:
            firsts = indices[:: pages.tokens].tolist()
            source = flat([pages.pool.get_data_page(first, flat=True).contiguous() for first in firsts], pages.nbytes)
        return self._store(self._open(pages), keys, source, extra_info)

    def _load(self, namespace: NamespaceId, keys: Sequence[str], into: Pieces) -> list[bool]:
        """Waits for the end, however it comes: until then the memory is written."""
        transfer = self._client.load(namespace, _keys(namespace, keys), into, self._settings.load_s)
        return [outcome is Outcome.HIT for outcome in transfer.result()]

    def _store(self, namespace: NamespaceId, names: Sequence[str], source: Pieces, extra_info: Any) -> list[bool]:
        """Offers again what there was no room for, for as long as a load may take."""
        keys, before = _keys(namespace, names), getattr(extra_info, "prefix_keys", None)
        parents = [_keys(namespace, before[-1:])[0] if before else ROOT_PARENT, *keys[:-1]]
        stored, left = [False] * len(keys), list(range(len(keys)))
        end = time.monotonic() + self._settings.load_s
        while left:
            transfer = self._client.store(
                namespace, [keys[i] for i in left], [parents[i] for i in left], source.take(left), later=True
            )
            outcomes = transfer.result()
            for i, outcome in zip(left, outcomes, strict=True):
                stored[i] = outcome is Outcome.HIT
            left = [i for i, outcome in zip(left, outcomes, strict=True) if outcome is Outcome.BUSY]
            if time.monotonic() > end:
                break
            if left:
                time.sleep(RETRY_S)
        return stored


def _keys(namespace: NamespaceId, names: Iterable[str]) -> list[BlockKey]:
    return [foreign_key(namespace, name.encode()) for name in names]


def _word(name: Any) -> str:
    """A pool's name: SGLang has them as an enum of strings."""
    return str(getattr(name, "value", name))


def _one_size(tensors: Sequence[torch.Tensor], count: int) -> int:
    """Bytes of each of ``count`` tensors; 0 where they are not so many, or differ."""
    sizes = {tensor.numel() * tensor.element_size() for tensor in tensors}
    if len(tensors) == count and len(sizes) == 1 and all(t.is_contiguous() and t.device.type == "cpu" for t in tensors):
        return sizes.pop()
    log.error(
        "%d keys came with %d tensors of %d sizes: contiguous ones of one size are kept",
        count,
        len(tensors),
        len(sizes),
    )
    return 0
