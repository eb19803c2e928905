"""Settings of the engine, frozen and checked at birth."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespacePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine schedules and what it asks of the cache.

    ``token_budget``    tokens computed in one step over all requests: the size of a prefill chunk
    ``running_max``     requests that hold memory at the same time
    ``lease_ttl_ms``    lifetime of the engine's leases; renewed at a third of it
    ``private_bytes``   most memory of the engine's own pool, used only while the cache gives none
    ``retry_s``         shortest and longest pause between attempts to reach a cache that was lost
    ``wait_ms``         longest sleep on a job of the cache when no request can run
    ``policy``          how the namespace is kept; None leaves the choice to the cache
    """

    token_budget: int = 512
    running_max: int = 16
    lease_ttl_ms: int = 30_000
    private_bytes: int = 1 << 30
    retry_s: tuple[float, float] = (0.1, 5.0)
    wait_ms: int = 20
    policy: NamespacePolicy | None = None
    name: str = field(default="engine")

    def __post_init__(self) -> None:
        for name in ("token_budget", "running_max", "lease_ttl_ms", "wait_ms"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"config.{name}", getattr(self, name), "at least 1")
        if self.private_bytes < 0:
            raise InvalidArgument("config.private_bytes", self.private_bytes, "0 or more")
        if not 0 <= self.retry_s[0] <= self.retry_s[1]:
            raise InvalidArgument("config.retry_s", self.retry_s, "two times in seconds, the shorter one first")
