"""Settings of the engine, frozen and checked at birth."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec, canonical_json

SCHEDULES: Final = ("priority", "fcfs", "shortest")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine schedules and what it asks of the cache.

    ``token_budget``    tokens computed in one step over all requests: the size of a prefill chunk
    ``running_max``     requests that hold memory at the same time
    ``lease_ttl_ms``    lifetime of the engine's leases; renewed at a third of it. Long, since a step that takes longer
                        is thrown away: a dead engine's leases go with its connection, not with this time
    ``private_bytes``   most memory of the engine's own pool, used only while the cache gives none
    ``host_share``      part of HOST that blocks of the engine may be pinned in; what a context needs beyond it and
                        DEVICE is read from storage layer by layer. Below 1, so that the store has room to write from
    ``hot_bytes``       most memory for slices from storage that selected attention has read lately and will want again;
                        each request that selects takes half of what is left of it
    ``retry_s``         shortest and longest pause between attempts to reach a cache that was lost
    ``cache_wait_s``    how long a request whose context ``private_bytes`` can not hold waits for a cache that was lost;
                        then it ends with CACHE. What the cache's storage has of it is not computed again
    ``wait_ms``         longest sleep on a job of the cache when no request can run
    ``device``          "cpu", "cuda", or "auto": a GPU if the cache's DEVICE is on one, else the CPU. "cuda" without a
                        cache is torch's current GPU. **No GPU has been tried yet**
    ``schedule``        who goes first: "priority" (the higher one, then who came first), "fcfs" (who came first,
                        whatever its priority), or "shortest" (as priority, but of equal ones that with the fewest
                        tokens, its longest answer included: long ones wait for as long as short ones come)
    ``policy``          how the namespace is kept; None leaves the choice to the cache
    ``kv_dtype``        what raw K and V are kept in, such as "float16" for a model that computes in float32; None takes
                        the dtype of the model's spec, in which it computes
    ``codec``           of blocks below DEVICE, "raw" or "int8"; None takes the one of the model's spec
    ``raw_layers``      layers that stay raw in int8 blocks, ascending; none takes those of the model's spec
    ``raw_first_tokens`` blocks wholly within the first so many tokens stay raw; 0 leaves it to ``policy``
    ``recent_raw_tokens`` blocks wholly within the last so many tokens of a running sequence are never moved out of
                        DEVICE by the engine: they are raw for as long as they are there. Where DEVICE is too small for
                        the windows of all requests, requests are preempted, and the last one uses private memory
    ``device_codec``    of full blocks on DEVICE, "raw" or "int8"; None leaves it to ``policy``. With "int8" a block is
                        encoded when it is committed: once it has left the recent window, or its request ends
    """

    token_budget: int = 512
    running_max: int = 16
    lease_ttl_ms: int = 300_000
    private_bytes: int = 1 << 30
    host_share: float = 0.9
    hot_bytes: int = 512 << 20
    retry_s: tuple[float, float] = (0.1, 5.0)
    cache_wait_s: float = 60.0
    wait_ms: int = 20
    device: str = "auto"
    schedule: str = "priority"
    policy: NamespacePolicy | None = None
    kv_dtype: str | None = None
    codec: str | None = None
    raw_layers: tuple[int, ...] = ()
    raw_first_tokens: int = 0
    recent_raw_tokens: int = 0
    device_codec: str | None = None
    name: str = field(default="engine")

    def __post_init__(self) -> None:
        for name in ("token_budget", "running_max", "lease_ttl_ms", "wait_ms"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"config.{name}", getattr(self, name), "at least 1")
        for name in ("private_bytes", "hot_bytes", "cache_wait_s", "raw_first_tokens", "recent_raw_tokens"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"config.{name}", getattr(self, name), "0 or more")
        if not 0.0 <= self.host_share <= 1.0:
            raise InvalidArgument("config.host_share", self.host_share, "0 to 1")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidArgument("config.device", repr(self.device), "auto, cpu or cuda")
        if self.schedule not in SCHEDULES:
            raise InvalidArgument("config.schedule", repr(self.schedule), f"one of {', '.join(SCHEDULES)}")
        # A wrong device_codec is refused here, and not when the namespace is opened.
        _ = self.policy_asked
        if not 0 <= self.retry_s[0] <= self.retry_s[1]:
            raise InvalidArgument("config.retry_s", self.retry_s, "two times in seconds, the shorter one first")

    def spec_for(self, spec: NamespaceSpec) -> NamespaceSpec:
        """The model's spec with what was asked for of dtype, codec and raw layers. Raises InvalidArgument."""
        kept = replace(spec, codec=self.codec or spec.codec, raw_layers=self.raw_layers or spec.raw_layers)
        if self.kv_dtype in (None, spec.dtype):
            return kept
        # A computation in another dtype gives other bits, even where K and V are rounded to the same one.
        extra = canonical_json({**json.loads(spec.extra or "{}"), "compute_dtype": spec.dtype})
        return replace(kept, dtype=self.kv_dtype, extra=extra)

    def place_of(self, priority: int, tokens: int) -> tuple[int, int]:
        """Priority and length by which a request of so many tokens, its longest answer included, is ranked."""
        return 0 if self.schedule == "fcfs" else priority, tokens if self.schedule == "shortest" else 0

    @property
    def open_tokens(self) -> int:
        """Last tokens of a sequence whose full blocks are not committed yet, since that would encode them."""
        policy = self.policy_asked
        return self.recent_raw_tokens if policy is not None and policy.device_codec != "raw" else 0

    @property
    def policy_asked(self) -> NamespacePolicy | None:
        """The policy with what has a setting of its own; None if nothing was asked for."""
        if not self.raw_first_tokens and self.device_codec is None:
            return self.policy
        policy = self.policy or NamespacePolicy()
        return replace(
            policy,
            raw_first_tokens=self.raw_first_tokens or policy.raw_first_tokens,
            device_codec=self.device_codec or policy.device_codec,
        )
