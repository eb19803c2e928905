"""Sessions by token: who may make data calls, and when a remote one has gone.

Guarded by its own lock, since remote sessions are opened and kept alive from handlers. Local sessions live as
long as their connection; remote ones until they close themselves or miss their keepalive.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument, Unauthenticated
from kvstore.core.types import SessionId
from kvstore.rpc.access import EVERYTHING, Access, Grant
from kvstore.store.session import Session
from kvstore.store.store import Store

TOKEN_BYTES: Final = 32
TTL_MS_MIN: Final = 1_000
TTL_MS_MAX: Final = 600_000
TTL_MS_DEFAULT: Final = 30_000


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """What OpenRemote answers."""

    session_id: SessionId
    token: bytes
    ttl_ms: int


@dataclass(slots=True)
class _Entry:
    """``now`` says what its caller may do by the policy in force; ``grant`` what it was when it was opened."""

    session: Session
    admin: bool
    grant: Grant
    now: Callable[[], Grant]
    ttl_ms: int = 0
    expires: float = float("inf")


class Sessions:
    """Tokens of living sessions. The store bounds how many there are."""

    def __init__(self, store: Store, clock: Clock, access: Access | None = None) -> None:
        self._store = store
        self.access = access or Access()
        self._clock = clock
        self._lock = threading.Lock()
        self._by_token: dict[bytes, _Entry] = {}
        self._token_of: dict[SessionId, bytes] = {}
        self.expired = 0
        """Remote sessions that missed their keepalive, so far."""

    def add_local(self, session: Session, *, admin: bool) -> bytes:
        """Make a token for the session of a connection. Its user's rights go with it."""
        return self._add(
            _Entry(session, admin, self.access.of_uid(session.uid), lambda: self.access.of_uid(session.uid))
        )

    def open_remote(self, name: str, ttl_ms: int, peer: str, bearer: str = "") -> RemoteSession:
        """Open a session that lives by keepalive. ``ttl_ms`` 0 takes the default. Raises Unauthenticated where the
        policy does not know ``bearer``, an authorization header.
        """
        grant = self.access.of_bearer(bearer)
        ttl_ms = ttl_ms or TTL_MS_DEFAULT
        if not TTL_MS_MIN <= ttl_ms <= TTL_MS_MAX:
            raise InvalidArgument("ttl_ms", ttl_ms, f"{TTL_MS_MIN} to {TTL_MS_MAX}, or 0 for {TTL_MS_DEFAULT}")
        session = self._store.open_session(name or peer, remote=True, peer=peer_name(peer))
        entry = _Entry(session, grant.admin, grant, lambda: self.access.of_bearer(bearer))
        entry.ttl_ms, entry.expires = ttl_ms, self._clock.now() + ttl_ms / 1000
        return RemoteSession(session.session_id, self._add(entry), ttl_ms)

    def _add(self, entry: _Entry) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        if entry.grant != EVERYTHING:
            entry.session.restrict(entry.grant.right)
        with self._lock:
            # By its digest: how far a guess is right does not show in the time of a look-up.
            self._by_token[_digest(token)] = entry
            self._token_of[entry.session.session_id] = _digest(token)
        return token

    def changed(self) -> list[SessionId]:
        """Sessions whose callers have other rights by now than when they were opened, which are to end."""
        with self._lock:
            entries = list(self._by_token.values())
        return [entry.session.session_id for entry in entries if entry.grant != _now(entry)]

    def find(self, token: bytes) -> tuple[Session, bool]:
        """Session and admin right of a token. Unauthenticated if it is unknown or its session has ended."""
        with self._lock:
            entry = self._by_token.get(_digest(token))
            if entry is None or entry.expires < self._clock.now():
                raise Unauthenticated(
                    "the session token is unknown, or its session has ended; open a new session",
                    field="kvstore-session",
                    value=token.hex()[:8] + "...",
                    expected="the token of a session that is alive",
                )
            return entry.session, entry.admin

    def keep_alive(self, session_id: SessionId) -> int:
        """Renew a remote session; returns its ttl in ms. InvalidArgument for a local one, which needs none."""
        with self._lock:
            entry = self._remote(session_id, "a connection needs no keepalive")
            entry.expires = self._clock.now() + entry.ttl_ms / 1000
            return entry.ttl_ms

    def close_remote(self, session_id: SessionId) -> None:
        """End a remote session now. InvalidArgument for a local one, which ends with its connection."""
        with self._lock:
            self._remote(session_id, "a local one ends when its connection closes")
        self.close(session_id)

    def _remote(self, session_id: SessionId, why: str) -> _Entry:
        """The living entry of a remote session. Lock held."""
        entry = self._by_token.get(self._token_of.get(session_id, b""))
        if entry is None:
            raise Unauthenticated("the session has ended; open a new session", field="kvstore-session")
        if not entry.ttl_ms:
            raise InvalidArgument("kvstore-session", "a local session", f"a remote one; {why}")
        return entry

    def close(self, session_id: SessionId) -> None:
        """End a session: its token, then all that the store holds for it. Idempotent."""
        with self._lock:
            entry = self._by_token.pop(self._token_of.pop(session_id, b""), None)
        if entry is not None:
            entry.session.close()

    def expire(self) -> int:
        """End remote sessions that missed their keepalive; returns how many."""
        now = self._clock.now()
        with self._lock:
            late = [entry.session.session_id for entry in self._by_token.values() if entry.expires < now]
        for session_id in late:
            self.close(session_id)
        self.expired += len(late)
        return len(late)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _now(entry: _Entry) -> Grant | None:
    """What the caller of a session may do by now; None if the policy does not know it any more."""
    try:
        return entry.now()
    except Unauthenticated:
        return None


def peer_name(peer: str) -> str:
    """Who the bounds of one peer go by: gRPC's name of a caller without the port, which is new for each connection.

    All of 127.0.0.0/8 and ::1 are this host: whoever is here has all of them.
    """
    address, _, port = peer.rpartition(":")
    name = address if address and port.isdigit() else peer
    return "loopback" if name.startswith("ipv4:127.") or name in ("ipv6:[::1]", "ipv6:%5B::1%5D") else name
