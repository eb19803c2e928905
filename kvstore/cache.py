"""The interface of the cache, met by the in-process form and by the client: write once, run embedded or remote.

Every method is synchronous and thread-safe. Lists of outcomes are in the order of the keys given. Invalid
arguments raise ``InvalidArgument`` and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    Area,
    BlockKey,
    Busy,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    Place,
    PlanId,
    Reason,
    ReservationId,
    Target,
    Tier,
)
from kvstore.tiers.versions import Versions


@dataclass(frozen=True, slots=True)
class NearNamespace:
    """A namespace of the same model that was opened with another spec, and the fields that differ."""

    namespace_id: NamespaceId
    fields: tuple[str, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """Answer of ``open_namespace``; ``near`` names other namespaces of the same model. ``storage_bytes`` is what all
    storage together may hold; 0 without any, or where the daemon does not say."""

    namespace_id: NamespaceId
    layout: BlockLayout
    created: bool
    near: tuple[NearNamespace, ...] = ()
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MatchResult:
    """``matched`` resident blocks from the first key on, each with its residency (bits of ``Tier.bit``)."""

    matched: int
    residency: tuple[int, ...]
    reason: Reason = Reason.NONE
    near: tuple[NearNamespace, ...] = ()


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """An entry a key (or a count): PENDING with id and place where space was claimed, HIT where the key is resident
    already, BUSY where there was no space (``busy`` says what was needed). ``standing``: the places are."""

    outcomes: tuple[Outcome, ...]
    reservation_ids: tuple[ReservationId, ...]
    places: tuple[Place | None, ...]
    busy: Busy | None = None
    standing: bool = False


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """One reserved block to publish: ``parent`` is ROOT_PARENT for the first of a chain."""

    reservation_id: ReservationId
    key: BlockKey
    parent: BlockKey


@dataclass(frozen=True, slots=True)
class CommitResult:
    """HIT where the block is now resident (``existed`` where it had been before); MISS with a reason where not.

    With a lease, ``places`` says where each block lies, pinned.
    """

    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    existed: tuple[bool, ...]
    places: tuple[Place | None, ...] = ()
    busy: Busy | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """HIT with a pinned place; MISS with a reason; PENDING under ``job_id``; BUSY with ``busy``."""

    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    places: tuple[Place | None, ...]
    job_id: JobId = field(default=JobId(0))
    busy: Busy | None = None


@dataclass(frozen=True, slots=True)
class PlanKeys:
    """What became of keys that a plan was given: HIT, it reads them; MISS with a reason.

    ``residency`` is a set of tiers (bits of ``Tier.bit``) for each: a MISS with any is in memory only, or in storage
    that is degraded, and its reason is NONE in the first case.
    """

    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    residency: tuple[int, ...]

    @classmethod
    def missed(cls, count: int) -> PlanKeys:
        """The answer where there is no plan to ask."""
        return cls((Outcome.MISS,) * count, (Reason.TIER_UNAVAILABLE,) * count, (0,) * count)


@dataclass(frozen=True, slots=True)
class PlanOpened:
    """A new plan; 0 if there is none. ``ring`` is where its pieces land in the session's buffer: 4,096 bytes that
    both sides count in, then ``pieces`` slots of ``stride`` bytes (docs/protocol.md)."""

    plan_id: PlanId
    ring: Place | None
    keys: PlanKeys


@dataclass(frozen=True, slots=True)
class PlanPass:
    """A pass that was queued: its number, by which pieces name it, and how many of them it has."""

    number: int
    pieces: int


class Cache(Protocol):
    """The data calls of one session, in process or over a transport."""

    @property
    def generation(self) -> int:
        """Counts the sessions behind this cache from 0; -1 before the first. In process it is always 0.

        Leases, reservations, jobs, places and views of ``memory`` belong to one generation. A client that has
        connected again has a new one, and nothing of those before.
        """

    def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """Make a namespace known. Raises NamespaceMismatch if ``name`` is bound to another spec."""

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """Longest run of resident blocks from the first key. Pure."""

    def reserve(  # noqa: PLR0913  a keyword a field of the request
        self,
        namespace_id: NamespaceId,
        tier: Tier,
        *,
        keys: Sequence[BlockKey] = (),
        count: int = 0,
        durability: Durability | None = None,
        standing: bool = False,
        whole: bool = False,
    ) -> ReserveResult:
        """Claim places to write, in this session's buffer (on CUDA: on DEVICE); by keys, or a count of tail blocks.

        ``durability`` is what the commit will ask for (None: what the policy says). With DURABLE a resident key is HIT
        only if it is durable already; else it gets a place, and its commit makes it durable.

        ``standing`` places (a count, for HOST) outlive their commit: once it has answered they are reserved again under
        the same ids, until abort or the session's end, so that a writer need not reserve for each batch.

        ``whole``: all places or none. Where one is refused all are BUSY but those that are HIT.

        The bytes to write at a place are raw slices at its stride; the commit copies them to where the block goes. The
        place belongs to the caller until commit, abort or the session's end.
        """

    def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """Publish reserved blocks, parents first. Raises UnknownReservation (nothing is committed then)."""

    def abort(self, reservation_ids: Sequence[ReservationId]) -> int:
        """Give reservations back; returns how many were known."""

    def fetch(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        *,
        lease_id: LeaseId,
        layers: tuple[int, int] | None = None,
        wait_ms: int = 0,
    ) -> FetchResult:
        """Make blocks readable and pin them under the lease; see Target. Raises UnknownLease."""

    def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """Wait for a job; PENDING outcomes if it is still under way. Raises UnknownJob."""

    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """Start promoting blocks to ``tier`` without pinning them."""

    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """Drop blocks from all tiers: HIT dropped, MISS absent, BUSY leased or pinned."""

    def flush(self, timeout_ms: int = 30_000) -> int:
        """Make every block committed so far durable; returns how many were written for it.

        Raises Unavailable if not all of them are durable then. Without an SSD tier it does nothing and returns 0.
        """

    def grant_lease(self, name: str, ttl_ms: int) -> LeaseId:
        """Make a lease of this session."""

    def renew_lease(self, lease_id: LeaseId) -> int:
        """Set the time left back to the ttl; returns it in ms. Raises UnknownLease."""

    def hold(self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """Keep resident blocks from being dropped, without pinning a place; False where a key is not resident."""

    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """End a lease, or with keys only what it holds of these. Returns how many things were released."""

    def open_plan(  # noqa: PLR0913  a keyword a field of the request
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        layers: tuple[int, int] | None = None,
        piece_bytes: int = 4 << 20,
        pieces: int = 4,
        idle_ms: int = 60_000,
    ) -> PlanOpened:
        """Resolve keys once, to read slices of their blocks from storage many times; see ``kvstore.client.plan``.

        The plan pins what it reads, and ends with ``close_plan``, with the session, or when its reader gave no sign for
        ``idle_ms``. Raises ResourceExhausted where the ring does not fit the session's buffer, or at a bound of plans.
        """

    def extend_plan(self, plan_id: PlanId, keys: Sequence[BlockKey]) -> PlanKeys:
        """Add keys behind those that a plan has; passes queued from now on read them, too. Raises UnknownPlan."""

    def advance_plan(
        self,
        plan_id: PlanId,
        *,
        layers: tuple[int, int] | None = None,
        blocks: Sequence[int] | None = None,
        drop: bool = False,
    ) -> PlanPass:
        """Queue a pass over layers of the plan (None: all) of all blocks, or of these by their numbers, in this order.

        ``drop`` forgets what is queued and the rest of the pass under way first. Raises UnknownPlan.
        """

    def close_plan(self, plan_id: PlanId) -> bool:
        """End a plan; False if it had ended."""

    def plan_bell(self) -> int:
        """An eventfd to write to when pieces were given back and the ring asks for it: the descriptor is the caller's,
        to be closed. Raises Unavailable where plans can not be read."""

    def memory(self, area: Area) -> memoryview:
        """This session's view of an area: BUFFER writable, DEVICE and HOST read-only. Places are offsets in it.

        On CUDA the DEVICE area has no host view: use ``device_tensor``. Raises Unavailable if not mapped.
        """

    def versions(self, area: Area) -> Versions:
        """The version of each page of 4,096 bytes of an area, as the store has it now; see ``Place.version``.

        Raises Unavailable if the area is not mapped, or has none.
        """

    def alive(self, generation: int) -> bool:
        """Whether the session of a generation still lives, as far as can be told without a call."""

    def device_tensor(self) -> Any:
        """DEVICE as a flat uint8 torch tensor on its GPU; None where it is shared memory, which ``memory`` has.

        The tensor belongs to one generation, and holds its mapping. Raises Unavailable if DEVICE is not mapped.
        """

    def close(self) -> None:
        """End the session: leases, reservations and the buffer go with it. Idempotent."""
