"""The error tree. Each class has one reason and one gRPC status.

::

    KVStoreError
    ├── InvalidArgument        INVALID_ARGUMENT     a field is wrong; the call changed nothing
    ├── NotFound               NOT_FOUND            no such namespace, lease, reservation, job, block
    │   ├── UnknownNamespace
    │   ├── UnknownLease                            also: expired
    │   ├── UnknownReservation                      also: committed or aborted before
    │   ├── UnknownJob
    │   ├── UnknownPlan                             also: ended
    │   └── UnknownBlock
    ├── NamespaceMismatch      FAILED_PRECONDITION  a name or an id is bound to another spec
    ├── Unauthenticated        UNAUTHENTICATED      the session token is unknown or the session has ended
    ├── PermissionDenied       PERMISSION_DENIED    the session has no right to this call
    ├── ResourceExhausted      RESOURCE_EXHAUSTED   a bound of the daemon is reached (sessions, leases, jobs)
    ├── DeadlineExceeded       DEADLINE_EXCEEDED    the call did not finish in time
    ├── Unavailable            UNAVAILABLE          the daemon is not there, or goes away
    ├── TierError              (never on the wire)  a tier failed; becomes misses
    │   ├── TierFull
    │   ├── TierUnavailable
    │   └── CorruptBlock
    └── InternalError          INTERNAL             a bug; the message says where it was logged

Outcomes that a caller must expect (a miss, a full tier) are values, not errors: see ``types.Outcome``.
"""

from __future__ import annotations

from typing import ClassVar


class KVStoreError(Exception):
    """Base of every error that the store raises.

    ``reason`` is one stable word for programs; ``field``, ``value`` and ``expected`` say which field of the
    request is wrong, what it held and what would be right ("" where they do not apply).
    """

    reason: ClassVar[str] = "INTERNAL"
    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", value: object = "", expected: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = str(value)
        self.expected = expected


class InvalidArgument(KVStoreError):
    """A field of the request is wrong. The message names field, value and what would be right."""

    reason = "INVALID_ARGUMENT"
    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} is {value}; expected {expected}", field=field, value=value, expected=expected)


class NotFound(KVStoreError):
    """What the request names is not known."""

    reason = "NOT_FOUND"
    status = "NOT_FOUND"


class UnknownNamespace(NotFound):
    """The namespace was not opened since the daemon started."""

    reason = "UNKNOWN_NAMESPACE"


class UnknownLease(NotFound):
    """The lease never was, has ended, has expired, or is another session's."""

    reason = "UNKNOWN_LEASE"


class UnknownReservation(NotFound):
    """The reservation never was, is finished, or is another session's."""

    reason = "UNKNOWN_RESERVATION"


class UnknownJob(NotFound):
    """The job never was, its answer was read, or it is another session's."""

    reason = "UNKNOWN_JOB"


class UnknownPlan(NotFound):
    """The plan never was, has ended, or is another session's."""

    reason = "UNKNOWN_PLAN"


class UnknownBlock(NotFound):
    """No block of this key is resident."""

    reason = "UNKNOWN_BLOCK"


class NamespaceMismatch(KVStoreError):
    """A name or an expected id is bound to another spec; ``field`` names the fields that differ."""

    reason = "NAMESPACE_MISMATCH"
    status = "FAILED_PRECONDITION"


class Unauthenticated(KVStoreError):
    """The session token is missing or unknown, or its session has ended."""

    reason = "UNAUTHENTICATED"
    status = "UNAUTHENTICATED"


class PermissionDenied(KVStoreError):
    """The session has no right to this call."""

    reason = "PERMISSION_DENIED"
    status = "PERMISSION_DENIED"


class ResourceExhausted(KVStoreError):
    """A bound of the daemon is reached."""

    reason = "RESOURCE_EXHAUSTED"
    status = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(KVStoreError):
    """The call did not finish in time; what it started goes on or is undone, never half visible."""

    reason = "DEADLINE_EXCEEDED"
    status = "DEADLINE_EXCEEDED"


class Unavailable(KVStoreError):
    """The daemon cannot be reached."""

    reason = "UNAVAILABLE"
    status = "UNAVAILABLE"


class InternalError(KVStoreError):
    """A bug: the daemon's log holds the traceback."""


class TierError(KVStoreError):
    """A tier failed. Stays inside the store, where it becomes a miss or a degraded tier."""

    reason = "TIER_ERROR"
    status = "UNAVAILABLE"


class TierFull(TierError):
    """The tier has no space for this write within its cap and its floor of free space."""

    reason = "TIER_FULL"

    def __init__(self, message: str, *, others: bool = False) -> None:
        super().__init__(message)
        self.others = others
        """Whether others have filled the disk: dropping blocks of our own would bring nothing back."""


class TierUnavailable(TierError):
    """The tier is degraded, closed, or did not answer in time."""

    reason = "TIER_UNAVAILABLE"


class CorruptBlock(TierError):
    """A checksum, a key or a length read back is not what was written. The bytes are never served."""

    reason = "CORRUPT_BLOCK"
