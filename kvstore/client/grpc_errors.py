"""What a failed gRPC call means: the domain error, and whether the session has ended with it."""

from __future__ import annotations

from typing import Any, Final

import grpc

from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unauthenticated, Unavailable
from kvstore.wire.errors import BOOT_METADATA, ERROR_METADATA, from_detail
from kvstore.wire.framing import MESSAGE_BYTES_MAX

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # The client reconnects by itself and with its own pauses; a channel that does so too would hide a restart.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

WRITES_DEFAULT: Final = 4
"""Write streams at a time where the daemon does not say how many it takes."""

_OF_THE_TRANSPORT: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})

CLOSE_SECONDS_MAX: Final = 1.0
"""Longest that closing a remote session waits for the daemon's answer."""


def domain_error(error: Any, method: str, timeout_s: float) -> tuple[KVStoreError, bool]:
    """The error to raise, and whether the session is gone: its daemon is not there or does not know it."""
    code = error.code()
    details = dict(error.trailing_metadata() or ())
    told = ERROR_METADATA in details
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not told:
        late = DeadlineExceeded(f"{method} did not answer within {timeout_s:g} s", field="timeout", value=timeout_s)
        return late, False
    if code in _OF_THE_TRANSPORT and not told:
        # The daemon's own word always comes with its detail: this one is gRPC's, and the session may be as before.
        return Unavailable(f"{method} was broken off on its way: {error.details()}"), False
    domain = from_detail(bytes(details.get(ERROR_METADATA, b"")), code.value[0], error.details() or "")
    return domain, isinstance(domain, Unauthenticated) or (isinstance(domain, Unavailable) and not told)


def no_turn(method: str, timeout_s: float) -> DeadlineExceeded:
    """A call waited in line behind others of its own client for too long, and was never sent."""
    return DeadlineExceeded(
        f"{method} had no turn within {timeout_s:g} s: other calls of this client are under way",
        field="timeout", value=timeout_s,
    )  # fmt: skip


def is_other_boot(initial_metadata: Any, boot_id: bytes) -> bool:
    """Whether a reply came from another run of the daemon than the session's."""
    found = dict(initial_metadata or ()).get(BOOT_METADATA)
    return bool(boot_id) and found is not None and found != boot_id
