"""A native plugin for LMCache: its chunks are kept by ``kvstored``, as a second level behind its own memory.

LMCache loads this file by its name (``"type": "native_plugin"``) and calls ``submit_batch_*`` under a lock of its own,
so nothing here waits for the daemon; it polls ``event_fd`` and takes what has ended. A chunk is a block of its own,
found by LMCache's whole key, which names model, rank, group, hash and salt.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.client import ClientOptions, EngineClient, Pieces, Transfer, default_socket
from kvstore.core.keys import foreign_key
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import ROOT_PARENT, BlockKey, Outcome


@dataclass(slots=True)
class _Batch:
    """One call of LMCache: what became of its keys so far."""

    number: int
    results: list[bool]
    whole: bool = False
    """Whether it went well only if all of its keys did: a store."""
    places: dict[Transfer, list[int]] = field(default_factory=dict)
    """Which keys of the batch each transfer moves."""
    views: Sequence[memoryview] = ()
    keys: Sequence[BlockKey] = ()


class TieredConnector:
    """The plugin. ``chunk_bytes`` is the size of LMCache's chunks; chunks of other sizes are not kept.

    No failure of the daemon raises or waits: what can not be moved is told as False. Thread-safe.
    """

    def __init__(
        self, chunk_bytes: int, socket: str = "", buffer_bytes: int = 256 << 20, deadline_s: float = 1.0, salt: str = ""
    ) -> None:
        options = ClientOptions(name="lmcache", device=False, buffer_bytes=buffer_bytes)
        self._client = EngineClient(socket or default_socket(), options, deadline_s=deadline_s)
        spec = NamespaceSpec(
            model="lmcache",
            dtype="bytes",
            layers=1,
            kv_heads=1,
            head_dim=1,
            opaque_slice_bytes=chunk_bytes,
            salt=salt.encode(),
        )
        self._bytes = chunk_bytes
        self._namespace = self._client.open_namespace(spec)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """Guards the table: a transfer may have ended before it is entered."""
        self._by_transfer: dict[Transfer, _Batch] = {}

    def event_fd(self) -> int:
        """Readable when ``drain_completions`` has something."""
        return self._client.fileno()

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Begin to ask which chunks are there."""
        batch = _Batch(next(self._numbers), [False] * len(keys), keys=self._keys(keys))
        with self._lock:
            self._track(batch, self._client.find(self._namespace, batch.keys), range(len(keys)))
        return batch.number

    def submit_batch_get(self, keys: list[str], memoryviews: list[Any]) -> int:
        """Begin to fill buffers, which are ours until the batch has ended."""
        batch, fits = self._batch(keys, memoryviews)
        pieces = self._pieces(batch, fits)
        with self._lock:
            self._track(batch, self._client.load(self._namespace, [batch.keys[i] for i in fits], pieces), fits)
        return batch.number

    def submit_batch_set(self, keys: list[str], memoryviews: list[Any]) -> int:
        """Begin to store buffers, which are ours until the batch has ended."""
        batch, fits = self._batch(keys, memoryviews)
        batch.whole = True
        with self._lock:
            self._store(batch, fits)
        return batch.number

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool] | None]]:
        """Batches that have ended: number, whether it went well, why not, and what became of each key."""
        ended: list[tuple[int, bool, str, list[bool] | None]] = []
        with self._lock:
            for transfer in self._client.step():
                batch = self._by_transfer.pop(transfer)
                again = []
                for i, outcome in zip(batch.places.pop(transfer), transfer.outcomes, strict=True):
                    batch.results[i] = outcome is Outcome.HIT
                    if outcome is Outcome.BUSY:
                        again.append(i)
                if again:
                    # The buffer had no room for these while others were on their way.
                    self._store(batch, again)
                elif not batch.places:
                    well = all(batch.results) or not batch.whole
                    ended.append((batch.number, well, "" if well else "not every chunk was stored", batch.results))
        return ended

    def close(self) -> None:
        """End the session; what is under way ends as False."""
        self._client.close()

    def _keys(self, names: Sequence[str]) -> list[BlockKey]:
        return [foreign_key(self._namespace, name.encode()) for name in names]

    def _batch(self, names: list[str], memoryviews: list[Any]) -> tuple[_Batch, list[int]]:
        """A new batch, and which of its chunks have the size that is kept."""
        views = [memoryview(view).cast("B") for view in memoryviews]
        batch = _Batch(next(self._numbers), [False] * len(names), views=views, keys=self._keys(names))
        return batch, [i for i, view in enumerate(views) if view.nbytes == self._bytes]

    def _pieces(self, batch: _Batch, indices: Sequence[int]) -> Pieces:
        return Pieces.each([batch.views[i] for i in indices], self._bytes)

    def _store(self, batch: _Batch, indices: Sequence[int]) -> None:
        keys = [batch.keys[i] for i in indices]
        parents = [ROOT_PARENT] * len(keys)
        pieces = self._pieces(batch, indices)
        self._track(batch, self._client.store(self._namespace, keys, parents, pieces, later=True), indices)

    def _track(self, batch: _Batch, transfer: Transfer, indices: Sequence[int]) -> None:
        batch.places[transfer] = list(indices)
        self._by_transfer[transfer] = batch
