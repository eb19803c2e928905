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
    domain = from_detail(bytes(details.get(ERROR_METADATA, b"")), code.value[0], error.details() or "")
    return domain, isinstance(domain, Unauthenticated) or (isinstance(domain, Unavailable) and not told)


def is_other_boot(initial_metadata: Any, boot_id: bytes) -> bool:
    """Whether a reply came from another run of the daemon than the session's."""
    found = dict(initial_metadata or ()).get(BOOT_METADATA)
    return bool(boot_id) and found is not None and found != boot_id
