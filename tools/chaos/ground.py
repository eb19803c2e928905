"""What every kind of trouble stands on: payloads that say whose they are, tenants, one daemon, and the findings."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.client.options import Control
from kvstore.core.keys import parents_of
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey, Durability, NamespaceId, Outcome
from kvstore.tools.daemon_process import DaemonProcess

TOKENS: Final = 4
"""Tokens a block."""
SIZES: Final = ((2, 4096), (4, 4096), (2, 65536), (2, 1 << 19))
"""Layers and slice bytes of the tenants' blocks: large ones live beside small ones."""
BROKEN_DISK: Final = (sys.executable, "-m", "kvstore.tools.chaos.broken_disk")


def payload(namespace: NamespaceId, key: BlockKey, nbytes: int) -> bytes:
    """The bytes of a block: they follow from its namespace and its key, and from nothing else."""
    return hashlib.shake_128(namespace + key).digest(nbytes)


def chain(name: str, blocks: int) -> list[BlockKey]:
    """Keys of a chain. They do not depend on a namespace: tenants have equal keys on purpose."""
    return [BlockKey(hashlib.sha256(f"{name}/{i}".encode()).digest()) for i in range(blocks)]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A namespace and the size of its blocks."""

    spec: NamespaceSpec

    @classmethod
    def of(cls, number: int, size: int = 0) -> Tenant:
        """Tenant ``number``, with a salt of its own and blocks of ``SIZES[size]``."""
        layers, slice_bytes = SIZES[size]
        return cls(
            NamespaceSpec(
                model=f"size-{size}", dtype="opaque", layers=layers, kv_heads=1, head_dim=1, block_tokens=TOKENS,
                opaque_slice_bytes=slice_bytes, salt=f"tenant {number}".encode(),
            )
        )  # fmt: skip

    @property
    def id(self) -> NamespaceId:
        """Its namespace."""
        return self.spec.namespace_id

    @property
    def nbytes(self) -> int:
        """Bytes of a payload."""
        return self.spec.layers * self.spec.opaque_slice_bytes

    def payload(self, key: BlockKey) -> bytes:
        """The bytes of one of its blocks."""
        return payload(self.id, key, self.nbytes)

    def blocks(self, keys: Sequence[BlockKey], durability: Durability | None = None) -> PutBlocks:
        """A chain of its blocks, ready to put."""
        return PutBlocks(keys, parents_of(keys), [self.payload(key) for key in keys], durability=durability)

    def wrong(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome], payloads: Sequence[Any]) -> list[int]:
        """Positions of HITs whose bytes are not those of their block."""
        return [
            i
            for i, (key, outcome, found) in enumerate(zip(keys, outcomes, payloads, strict=True))
            if outcome is Outcome.HIT and found is not None and bytes(found) != self.payload(key)
        ]


@dataclass(slots=True)
class Findings:
    """What was found: how often by kind, and the first of each kind in words."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    hits: int = 0

    def add(self, kind: str, words: str, count: int = 1) -> None:
        """Note a finding."""
        if kind not in self.counts:
            print(f"found: {kind}: {words}", flush=True)
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.first.setdefault(kind, words)


@dataclass(slots=True)
class Ground:
    """One daemon in a folder of its own, and what a round needs around it."""

    folder: Path
    rng: random.Random
    findings: Findings
    daemon: DaemonProcess
    flags: dict[str, str]
    seconds: float = 5.0
    """How long a kind of trouble that has no end of its own goes on."""

    @classmethod
    def make(cls, folder: Path, rng: random.Random, findings: Findings, **flags: str) -> Ground:
        """A daemon that is not started yet; ``flags`` are those of kvstored, with _ for -."""
        whole = {
            "device": "0",
            "host": "24 MiB",
            "ssd": "96 MiB",
            "ssd-dir": str(folder / "ssd"),
            "ssd-free-floor": "0",
        }
        whole |= {"listen": "127.0.0.1:0", "drain-timeout-s": "3", "log-level": "info"}
        whole |= {name.replace("_", "-"): value for name, value in flags.items()}
        return cls(folder, rng, findings, DaemonProcess(folder, whole, BROKEN_DISK), whole)

    def options(self, **changes: Any) -> ClientOptions:
        """Options of a client: small, and of either transport of this host."""
        changes.setdefault("control", self.rng.choice((Control.SOCKET, Control.SOCKET, Control.GRPC)))
        return ClientOptions(**{"buffer_bytes": 4 << 20, "timeout_s": 5.0, "connect_timeout_s": 5.0, **changes})

    def client(self, tenants: Iterable[Tenant], **changes: Any) -> Client:
        """A client that has opened these tenants' namespaces."""
        client = Client(self.daemon.socket, self.options(**changes))
        for tenant in tenants:
            client.open_namespace(tenant.spec)
        return client

    def check(self, kind: str, tenant: Tenant, keys: Sequence[BlockKey], got: Any, words: str) -> int:
        """Compare every HIT of a get; returns how many were wrong."""
        self.findings.hits += sum(outcome is Outcome.HIT for outcome in got.outcomes)
        wrong = tenant.wrong(keys, got.outcomes, got.payloads)
        if wrong:
            self.findings.add(kind, f"{words}: {len(wrong)} of {len(keys)} blocks, the first at {wrong[0]}", len(wrong))
        return len(wrong)

    def fill(self, client: Client, tenant: Tenant, name: str, nbytes: int) -> None:
        """Put other blocks, chains of eight, until ``nbytes`` were put."""
        for i in range(max(1, nbytes // (8 * tenant.nbytes))):
            client.put(tenant.id, tenant.blocks(chain(f"{name} {i}", 8)))
