"""The one table from domain error to gRPC status and back.

An error crosses the wire as a gRPC status code and an ``ErrorDetail``; over gRPC the detail travels in the
trailing metadata ``kvstore-error-bin``, on the session socket in an error frame. The client turns it back
into the same class, so a caller sees the same exception embedded, over the socket and over gRPC.
"""

from __future__ import annotations

import logging
import uuid
from typing import Final

from kvstore.core import errors
from kvstore.core.errors import InternalError, KVStoreError
from kvstore.v1 import common_pb2

log = logging.getLogger(__name__)

ERROR_METADATA: Final = "kvstore-error-bin"
"""Trailing metadata that holds the serialised ErrorDetail."""

SESSION_METADATA: Final = "kvstore-session"
"""Request metadata that holds the session token, in hexadecimal."""

BOOT_METADATA: Final = "kvstore-boot-bin"
"""Initial metadata of every reply: the boot id of the daemon."""

STATUS_CODES: Final[dict[str, int]] = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}
"""gRPC's numbers of the statuses that appear here; the same numbers are the ``code`` of an error frame."""

ERRORS: Final[tuple[type[KVStoreError], ...]] = (
    errors.InvalidArgument,
    errors.NotFound,
    errors.UnknownNamespace,
    errors.UnknownLease,
    errors.UnknownReservation,
    errors.UnknownJob,
    errors.UnknownPlan,
    errors.UnknownBlock,
    errors.NamespaceMismatch,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.ResourceExhausted,
    errors.DeadlineExceeded,
    errors.Unavailable,
    errors.TierError,
    errors.TierFull,
    errors.TierUnavailable,
    errors.CorruptBlock,
    errors.InternalError,
)
"""Every error class with its own reason. The client's class is the daemon's class."""

_BY_REASON: Final[dict[str, type[KVStoreError]]] = {error.reason: error for error in ERRORS}

_BY_STATUS: Final[dict[int, type[KVStoreError]]] = {
    STATUS_CODES["CANCELLED"]: errors.Unavailable,
    STATUS_CODES["INVALID_ARGUMENT"]: errors.InvalidArgument,
    STATUS_CODES["DEADLINE_EXCEEDED"]: errors.DeadlineExceeded,
    STATUS_CODES["NOT_FOUND"]: errors.NotFound,
    STATUS_CODES["PERMISSION_DENIED"]: errors.PermissionDenied,
    STATUS_CODES["RESOURCE_EXHAUSTED"]: errors.ResourceExhausted,
    STATUS_CODES["FAILED_PRECONDITION"]: errors.NamespaceMismatch,
    STATUS_CODES["UNIMPLEMENTED"]: errors.Unavailable,
    STATUS_CODES["INTERNAL"]: errors.InternalError,
    STATUS_CODES["UNAVAILABLE"]: errors.Unavailable,
    STATUS_CODES["UNAUTHENTICATED"]: errors.Unauthenticated,
}

_MESSAGE_BYTES_MAX: Final = 800
_VALUE_BYTES_MAX: Final = 400
_STATUS_CHARACTERS_MAX: Final = 200
"""gRPC gives all trailers of an answer 8 KiB, and encodes both: the detail in base64, the message byte by byte."""


def status_code(error: KVStoreError) -> int:
    """gRPC status code of a domain error."""
    return STATUS_CODES[error.status]


def as_domain(error: Exception, method: str) -> KVStoreError:
    """The error itself if it is ours; else an InternalError whose id stands in the log beside the traceback."""
    if isinstance(error, KVStoreError):
        return error
    incident = uuid.uuid4().hex[:12]
    log.error("%s failed, incident %s", method, incident, exc_info=error)
    return InternalError(f"{method} failed by a bug; the daemon's log holds the traceback under {incident}")


def to_detail(error: KVStoreError) -> common_pb2.ErrorDetail:
    """Message of a domain error; long values are cut, since they come from the request."""
    return common_pb2.ErrorDetail(
        reason=error.reason,
        message=_cut(error.message, _MESSAGE_BYTES_MAX),
        field=_cut(error.field, _VALUE_BYTES_MAX),
        value=_cut(error.value, _VALUE_BYTES_MAX),
        expected=_cut(error.expected, _VALUE_BYTES_MAX),
    )


def status_text(error: KVStoreError) -> str:
    """The message of a gRPC status: short and ASCII, since the detail beside it has the whole."""
    return error.message[:_STATUS_CHARACTERS_MAX].encode("ascii", "backslashreplace").decode()[:_MESSAGE_BYTES_MAX]


def _cut(text: str, nbytes: int) -> str:
    """At most so many bytes of a text; what is no Unicode in it becomes a question mark."""
    return text.encode("utf-8", "replace")[:nbytes].decode("utf-8", "ignore")


def from_detail(data: bytes, code: int, fallback: str = "") -> KVStoreError:
    """Rebuild the domain error from a serialised ErrorDetail (may be empty), its status code and a message."""
    detail = common_pb2.ErrorDetail.FromString(data) if data else common_pb2.ErrorDetail()
    kind = _BY_REASON.get(detail.reason) or _BY_STATUS.get(code, InternalError)
    error = kind.__new__(kind)
    message = detail.message or fallback or f"status {code}"
    KVStoreError.__init__(error, message, field=detail.field, value=detail.value, expected=detail.expected)
    return error
