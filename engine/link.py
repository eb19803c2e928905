"""The engine's session with the cache: leases, areas, and what happens when it is lost.

Everything that the engine reads through addresses is pinned by two leases of this session: ``pins`` for blocks where
they were found or sealed, ``moved`` for the HOST copies of blocks that were moved out of DEVICE. A third one, ``held``,
keeps blocks in storage from being dropped. While they live the bytes cannot change. They can end without the engine's
doing: the daemon dies, the connection breaks, or the process was stopped for longer than the leases live. So

- any call that fails with an error of the connection or of a lease raises ``LinkLost``, and the engine treats all
  blocks as gone: the areas stay mapped until then, but a pin that is not known to live is never trusted;
- so does a call that succeeded over a new connection (``generation`` of the client): its offsets mean other memory;
- ``confirm`` proves, after a step's reads, that the leases were alive all the time: without a call while they cannot
  have run out by the clock, otherwise by renewing them. A step that cannot be confirmed is thrown away.

``attach`` makes a new session state on the same cache object; it is tried again with growing pauses while the cache
is away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch

from kvstore.cache import Cache
from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument, KVStoreError, NamespaceMismatch, Unavailable
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, LeaseId, NamespaceId
from kvstore.engine.config import EngineConfig
from kvstore.engine.memory import CPU, Region, map_areas

LOG: Final = logging.getLogger("kvstore.engine")

_Answer = TypeVar("_Answer")


class LinkLost(Exception):
    """The session with the cache ended: every block that was pinned through it must be treated as gone."""


class CacheLink:
    """One session with the cache, which may be away; ``up`` says whether calls are worth trying.

    Owned by one engine and used from its thread only. The cache object stays the caller's.
    """

    def __init__(self, cache: Cache | None, spec: NamespaceSpec, config: EngineConfig, clock: Clock) -> None:
        self._cache = cache
        self._spec = spec
        self._config = config
        self._clock = clock
        self._renewed_at = 0.0
        self._retry_at = self._down_since = clock.now()
        self._generation = 0
        self._pause = config.retry_s[0]
        self._regions: dict[Area, Region] = {}
        self._device: torch.device | None = None
        self.namespace: NamespaceId = spec.namespace_id
        self.pins = LeaseId(0)
        self.moved = LeaseId(0)
        self.held = LeaseId(0)
        self.storage_bytes = 0
        """What the cache's storage may hold, as far as it said."""
        self._granted: list[LeaseId] = []
        self.up = False
        self.losses = 0
        self._tells = True

    @property
    def cache(self) -> Cache:
        """The cache; raises LinkLost where there is none."""
        if self._cache is None:
            raise LinkLost("the engine runs without a cache")
        return self._cache

    def attach(self) -> bool:
        """Open the namespace, map the areas and grant the leases if the cache is away and a new try is due.

        Returns True while the link is up. Raises InvalidArgument and NamespaceMismatch: these no retry mends.
        """
        if self.up or self._cache is None or self._clock.now() < self._retry_at:
            return self.up
        try:
            opened = self._cache.open_namespace(self._spec, policy=self._config.policy_asked)
            self._generation = self._generation_now()
            self._regions = map_areas(self._cache, self._spec.layers)
            self._check_device(self._regions[Area.DEVICE].device if self.reaches(Area.DEVICE) else CPU)
            self._renewed_at = self._clock.now()
            self.pins = self._cache.grant_lease(f"{self._config.name}:pins", self._config.lease_ttl_ms)
            self.moved = self._cache.grant_lease(f"{self._config.name}:moved", self._config.lease_ttl_ms)
            self.held = self._cache.grant_lease(f"{self._config.name}:held", self._config.lease_ttl_ms)
            self._check_generation()
        except (InvalidArgument, NamespaceMismatch):
            raise
        except KVStoreError as error:
            self._put_off(error)
            return False
        self.namespace, self.storage_bytes = opened.namespace_id, opened.storage_bytes
        self.up, self._tells, self._pause = True, True, self._config.retry_s[0]
        return True

    def call(self, method: Callable[[Cache], _Answer]) -> _Answer:
        """Make one call of the cache; any error of it ends the link and raises LinkLost from it.

        Raises LinkLost at once, without a call, while the link is down.
        """
        if not self.up:
            raise LinkLost("the cache is away")
        try:
            answer = method(self.cache)
            self._check_generation()
        except KVStoreError as error:
            self.lose(error)
            raise LinkLost(str(error)) from error
        return answer

    def confirm(self) -> None:
        """Return if every pin has lived until now, else raise LinkLost. Renews when a third of the ttl has passed."""
        if not self.up:
            return
        now = self._clock.now()
        if now - self._renewed_at < self._config.lease_ttl_ms / 3000.0:
            return
        for lease in (self.pins, self.moved, self.held, *self._granted):
            self.call(lambda cache, lease=lease: cache.renew_lease(lease))  # type: ignore[misc]
        self._renewed_at = now

    def flush(self, timeout_ms: int) -> bool:
        """Ask that what was committed is written to storage; False if not all of it was. Raises LinkLost."""
        try:
            self.cache.flush(timeout_ms)
        except Unavailable as error:
            LOG.info("a flush was not complete: %s", error)
            return False
        except KVStoreError as error:
            self.lose(error)
            raise LinkLost(str(error)) from error
        return True

    @property
    def lease_ttl_ms(self) -> int:
        """How long rights of the engine outlive a sign of it."""
        return self._config.lease_ttl_ms

    @property
    def lost(self) -> bool:
        """True while a cache that was there is not."""
        return not self.up and self.losses > 0

    @property
    def away_s(self) -> float:
        """Seconds since the cache was lost; 0 while it is there."""
        return 0.0 if self.up else self._clock.now() - self._down_since

    def pause(self, longest_ms: int) -> None:
        """While the cache is lost, sleep until it is to be tried again, for ``longest_ms`` at most."""
        if self.lost:
            time.sleep(max(0.0, min(self._retry_at - self._clock.now(), longest_ms / 1000.0)))

    def now(self) -> float:
        """Seconds of the clock that leases go by."""
        return self._clock.now()

    def grant(self, name: str) -> LeaseId:
        """A further lease, which the caller ends; it lives as long as the engine's own."""
        lease = self.call(lambda cache: cache.grant_lease(f"{self._config.name}:{name}", self._config.lease_ttl_ms))
        self._granted.append(lease)
        return lease

    def end(self, lease: LeaseId) -> None:
        """End a lease that ``grant`` gave, with all that it holds."""
        if lease in self._granted and self.up:
            self._granted.remove(lease)
            self.call(lambda cache: cache.release(lease))

    def lease_of(self, moved: bool) -> LeaseId:
        """The lease that pins a block in memory: another one once it was moved out of DEVICE."""
        return self.moved if moved else self.pins

    def release(self, lease: LeaseId, keys: Sequence[BlockKey]) -> None:
        """Give back what a lease holds of these keys. While the link is down they are gone already."""
        if not self.up:
            return
        for begin in range(0, len(keys), BATCH_KEYS_MAX):
            part = keys[begin : begin + BATCH_KEYS_MAX]
            self.call(lambda cache, part=part: cache.release(lease, self.namespace, part))  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """Where the engine computes; settled by the first call, or by the first cache that was attached before it.

        Raises InvalidArgument if "cuda" was asked for and torch has none.
        """
        if self._device is None:
            self._device = cuda_device() if self._config.device == "cuda" else CPU
        return self._device

    def _check_device(self, found: torch.device) -> None:
        """Keep the engine on one device. Raises InvalidArgument where another one was asked for, else Unavailable."""
        if self._config.device not in ("auto", found.type):
            raise InvalidArgument("config.device", self._config.device, f"auto or {found.type}, where DEVICE lies")
        if self._device not in (None, found):
            raise Unavailable(f"DEVICE lies on {found} and the engine was begun on {self._device}: begin it again")
        self._device = found

    def reaches(self, area: Area) -> bool:
        """Whether kernels can read the area in place."""
        return area in self._regions

    def region(self, area: Area) -> Region:
        """The mapped area; valid while the link is up."""
        return self._regions[area]

    def lose(self, error: Exception) -> None:
        """Take the link down: addresses and leases of this session are worthless from here on."""
        if self.up:
            LOG.warning("the cache was lost (%s); going on by recompute", error)
            self.losses, self._tells = self.losses + 1, False
            self._down_since = self._clock.now()
        self._put_off(error)

    def close(self) -> None:
        """Give the leases back. The areas' mappings are let go so that the owner may close the cache."""
        if self.up:
            for lease in (self.pins, self.moved, self.held, *self._granted):
                try:
                    self.cache.release(lease)
                except KVStoreError as error:
                    LOG.info("lease %d was gone before it could be released: %s", lease, error)
        self.up = False
        self._cache = None
        self._regions.clear()

    def _generation_now(self) -> int:
        return self._cache.generation if self._cache is not None else 0

    def _check_generation(self) -> None:
        """Raise Unavailable if a client connected again by itself: its answers are about other memory than ours."""
        if self._generation_now() != self._generation:
            raise Unavailable("the client connected again: blocks of the session before are gone")

    def _put_off(self, error: Exception) -> None:
        if self._tells:
            # Once until it is there again: an engine that goes on without its cache is right, but slow.
            LOG.warning("the cache can not be used, so everything is computed: %s", error)
        self.up = self._tells = False
        self._regions = {}
        self._granted = []
        self._retry_at = self._clock.now() + self._pause
        LOG.info("the cache is away (%s); next try in %.1f s", error, self._pause)
        self._pause = min(2 * self._pause, self._config.retry_s[1])


def cuda_device(field: str = "config.device") -> torch.device:
    """Torch's current GPU. Raises InvalidArgument, which names ``field``, if there is none."""
    if not torch.cuda.is_available():
        raise InvalidArgument(field, "cuda", "auto or cpu, since torch has no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
