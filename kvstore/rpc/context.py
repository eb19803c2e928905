"""What a handler knows of its call, and what it may use: no transport, no message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from kvstore.core.errors import Unauthenticated
from kvstore.rpc.wire import Wire

if TYPE_CHECKING:
    from kvstore.rpc.sessions import Sessions
    from kvstore.store.session import Session
    from kvstore.store.store import Store


@dataclass(frozen=True, slots=True)
class Services:
    """The collaborators of all handlers; made once by the composition root."""

    store: Store
    sessions: Sessions
    version: str
    pid: int
    wire: Wire = field(default_factory=Wire)
    looked_at: Callable[[], dict[str, int]] = dict
    """Counters of the process that Status shows beside the store's."""

    def counters(self) -> dict[str, int]:
        """What is counted outside of the store."""
        return {**self.wire.counters(), **self.looked_at(), "sessions_expired": self.sessions.expired}


@dataclass(frozen=True, slots=True)
class CallContext:
    """One caller: its session (``opened``, None without a token) and whether it has admin rights."""

    services: Services
    opened: Session | None
    admin: bool
    peer: str
    bearer: str = field(default="", repr=False)
    """The authorization header of a gRPC call; only the call that opens a session looks at it."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for the answer any more: the call was cancelled, or its connection has ended.
    What takes long asks between its steps."""
    session: Session = field(init=False)
    """The caller's session. Whatever is asked of it raises Unauthenticated where there is none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "session", self.opened or _NoSession())

    @property
    def store(self) -> Store:
        """The store."""
        return self.services.store

    @property
    def boot_id(self) -> bytes:
        """Which process of the daemon this is."""
        return self.services.store.boot_id


class _NoSession:
    """Stands where a session would."""

    def __getattr__(self, _name: str) -> NoReturn:
        raise no_session()


def no_session() -> Unauthenticated:
    """The error of a call that needs a session and has none."""
    return Unauthenticated(
        "the call carries no session token; connect to the session socket (same host) or call "
        "Sessions/OpenRemote, and send the token in hexadecimal as metadata kvstore-session",
        field="kvstore-session",
        expected="the token of a session that is alive",
    )
