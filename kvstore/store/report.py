"""What the admin calls answer: plain values that mirror ``protos/kvstore/v1/admin.proto`` and ``events.proto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvstore.cache import NearNamespace
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.transfers import Edge, SlowTransfer, Transfers
from kvstore.core.types import ROOT_PARENT, BlockKey, Codec, LeaseId, NamespaceId, Outcome, Reason, SessionId, Tier
from kvstore.tiers.base import RecoveryReport

NO_NAMESPACE: Final = NamespaceId(b"")


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier; ``state`` is "ready", "degraded" or "off"."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int = 0
    blocks: int = 0
    pinned_bytes: int = 0
    state: str = "ready"
    last_error: str = ""
    backing: str = ""
    evicted: int = 0
    demoted: int = 0
    promoted: int = 0
    removed: int = 0
    high_watermark: float = 0.0
    low_watermark: float = 0.0
    raw_bytes: int = 0
    saved_bytes: int = 0
    fragmentation: float = 0.0


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The whole store at one moment; counters are named as docs/operations.md lists them."""

    boot_id: bytes
    uptime_seconds: float
    tiers: tuple[TierReport, ...]
    namespaces: int
    sessions: int
    leases: int
    reservations: int
    jobs: int
    draining: bool
    recovery: RecoveryReport
    counters: dict[str, int]
    warnings: tuple[str, ...]
    transfers: Mapping[Edge, Transfers] = field(default_factory=dict)
    slow: tuple[SlowTransfer, ...] = ()
    index: str = ""
    """Form of the index of blocks: "native", or "python" where the C++ extension is absent."""


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """One namespace; ``blocks_by_tier`` counts DEVICE, HOST, SSD, and what storage there is behind it."""

    namespace_id: NamespaceId
    name: str
    spec: NamespaceSpec
    policy: NamespacePolicy
    layout: BlockLayout
    blocks: int
    blocks_by_tier: tuple[int, ...]
    saved_bytes: int = 0
    brought: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block. ``state`` is "ready", "absent" (a missing parent of resident blocks) or what is under way."""

    key: BlockKey
    parent: BlockKey
    namespace_id: NamespaceId
    residency: int
    state: str
    pins: int
    holds: int
    children: int
    idle_seconds: float
    hits: int
    places: dict[str, str]
    codec: Codec


@dataclass(frozen=True, slots=True)
class BlockPage:
    """A page of blocks, coldest first; ``next_page_token`` is "" on the last one."""

    blocks: tuple[BlockReport, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True)
class WhyReport:
    """How far a chain matches and why it ends there. ``key`` is empty when all of it matches."""

    blocks: int
    matched: int
    residency: tuple[int, ...]
    key: bytes
    reason: Reason
    explanation: str
    seconds_ago: float = 0.0
    near: tuple[NearNamespace, ...] = ()


@dataclass(frozen=True, slots=True)
class EvictReport:
    """Blocks and bytes that left the tier. If keys were named, for each an outcome and why it stays, as words; else, if
    less went than was asked for, the bytes that are pinned or held."""

    blocks: int
    bytes: int
    outcomes: tuple[Outcome, ...] = ()
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """Blocks that a step removed, that stay since they are leased or pinned, and that are still here (those too)."""

    removed: int
    kept: int
    left: int


@dataclass(slots=True)
class CopyExplained:
    """One copy; see ``protos/kvstore/v1/inspect.proto``."""

    tier: Tier
    bytes: int
    fate: str
    kept: tuple[str, ...]
    colder: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True)
class Keeper:
    """Who keeps a block from going: a lease, or an operator's pin."""

    kind: str
    name: str
    owner: str
    pid: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class ExplainReport:
    """One block, or with no copy why it is a miss."""

    key: BlockKey
    parent: BlockKey = ROOT_PARENT
    depth: int = 0
    copies: tuple[CopyExplained, ...] = ()
    keepers: tuple[Keeper, ...] = ()
    children: int = 0
    hits: int = 0
    idle_seconds: float = 0.0
    reason: Reason = Reason.NONE
    seconds_ago: float = 0.0


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of blocks; see ``protos/kvstore/v1/inspect.proto``."""

    level: int
    key: bytes
    blocks: int
    residency: int
    total_blocks: int
    total_bytes: int
    bytes_by_tier: tuple[int, ...]
    hits: int
    idle_seconds: float
    hidden: int


@dataclass(frozen=True, slots=True)
class TreeReport:
    """Chains of a namespace: nodes, blocks in all, chains that are not among the nodes."""

    nodes: tuple[TreeNode, ...]
    blocks: int
    hidden: int


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One Match: its blocks as numbers, and how many were here."""

    sequence: int
    unix_seconds: float
    namespace_id: NamespaceId
    block_tokens: int
    prefix_ids: tuple[int, ...]
    matched: int


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Entries of a recording, the sequence to go on from, and how many were no longer kept."""

    entries: tuple[TraceEntry, ...]
    sequence: int
    lost: int


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """One lease; ``owner`` is its session's name, and ``seconds_left`` is 0 for that of a stream, which has no clock.

    Operator pins have lease id 0 and owner "operator".
    """

    lease_id: LeaseId
    name: str
    owner: str
    pid: int
    seconds_left: float
    holds: int
    pins: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class SessionReport:
    """One open session."""

    session_id: SessionId
    owner: str
    pid: int
    uid: int
    buffer_bytes: int
    buffer_used_bytes: int
    reservations: int
    remote: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Blocks read back; a bad copy is dropped and never served again."""

    blocks: int
    bytes: int
    bad: int
    bad_keys: tuple[BlockKey, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class DrainReport:
    """Whether new blocks are refused, and what of the old ones is on SSD."""

    draining: bool
    flushed_blocks: int
    unflushed_blocks: int


@dataclass(frozen=True, slots=True)
class FlushReport:
    """Blocks and bytes written because of a flush; ``failure`` says why not all is durable, "" if all is."""

    blocks: int
    bytes: int
    failure: str = ""


class EventKind(IntEnum):
    """Numbers of the wire."""

    STORED = 1
    REMOVED = 2
    GAP = 3


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that came to or left a tier. A GAP says that events before ``sequence`` are no longer kept."""

    sequence: int
    unix_seconds: float
    kind: EventKind
    tier: Tier | None = None
    namespace_id: NamespaceId = NO_NAMESPACE
    keys: tuple[BlockKey, ...] = ()
    parents: tuple[BlockKey, ...] = ()
    token_ids: Sequence[int] = field(default=())
    block_tokens: int = 0
