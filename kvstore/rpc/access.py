"""Who may do what, from one file: roles for bearer tokens and for users of this host, by patterns of namespaces.

::

    [[allow]]
    name = "team-a"                          # for logs
    token_sha256 = ["9f86d0..."]             # digests: the file holds no token
    uids = [1001]
    namespaces = ["team-a/llama-*"]          # TENANT/MODEL; the tenant is the salt as text, "-" without one
    roles = ["data-read", "data-write"]      # data-write includes data-read; "admin" is for namespaces = ["*/*"]

Without a file every caller has data rights. With one nobody has any that it does not give, but root and the daemon's
own user. It is read again by ``reload``; a file that is wrong then changes nothing. ``Access`` is the loop's.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from kvstore.core.errors import InvalidArgument, Unauthenticated
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.rights import Right

log = logging.getLogger("kvstored")

AUTHORIZATION: Final = "authorization"
BEARER: Final = "Bearer "
ENTRY_KEYS: Final = frozenset({"name", "token_sha256", "uids", "namespaces", "roles"})


class Role(StrEnum):
    """What an entry of the file may give."""

    READ = "data-read"
    WRITE = "data-write"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one caller may do: patterns with their rights, and whether admin calls are among it."""

    rules: tuple[tuple[str, str, Right], ...] = ()
    admin: bool = False

    def right(self, spec: NamespaceSpec) -> Right:
        """The highest right of any pattern that fits; a ``Rights``."""
        fitting = (r for t, m, r in self.rules if fnmatchcase(spec.tenant, t) and fnmatchcase(spec.model, m))
        return max(fitting, default=Right.NONE)

    def joined(self, other: Grant) -> Grant:
        """Both together."""
        return Grant(self.rules + other.rules, self.admin or other.admin)


EVERYTHING: Final = Grant((("*", "*", Right.WRITE),))
"""All data rights, of callers that no file restricts. Admin rights go by ``admin_uids``."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The file's entries."""

    tokens: tuple[tuple[bytes, Grant], ...]
    uids: dict[int, Grant]

    @classmethod
    def read(cls, file: Path) -> Policy:
        """Raises InvalidArgument, naming the entry, for a file that is wrong or that others may write."""
        try:
            with file.open("rb") as opened:
                found = os.fstat(opened.fileno())
                text = opened.read().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument("policy", str(file), f"a UTF-8 file that can be read ({error})") from error
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid not in (0, os.geteuid()):
            raise InvalidArgument("policy", str(file), "a file that only root or the daemon's user can write")
        try:
            entries = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument("policy", str(file), f"TOML ({error})") from error
        if set(entries) - {"allow"}:
            raise InvalidArgument("policy", min(set(entries) - {"allow"}), "tables [[allow]] and nothing else")
        tokens: list[tuple[bytes, Grant]] = []
        uids: dict[int, Grant] = {}
        for number, entry in enumerate(entries.get("allow", []), 1):
            grant = _grant(number, entry)
            tokens += [(_digest(number, text), grant) for text in _strings(number, entry, "token_sha256")]
            for uid in _uids(number, entry):
                uids[uid] = uids.get(uid, Grant()).joined(grant)
        return cls(tuple(tokens), uids)

    def of_token(self, token: str) -> Grant | None:
        """What a token gives; None for one that is not in the file. Every entry is compared, in constant time."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = Grant()
        known = False
        for held, grant in self.tokens:
            if hmac.compare_digest(held, digest):
                found, known = found.joined(grant), True
        return found if known else None


class Access:
    """The policy in force."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._policy = Policy.read(file) if file is not None else None

    @property
    def restricted(self) -> bool:
        """Whether there is a file."""
        return self._policy is not None

    def reload(self) -> None:
        """Read the file again; a wrong one is logged, and the one before stays in force."""
        if self._file is None:
            return
        try:
            self._policy = Policy.read(self._file)
        except InvalidArgument as error:
            log.error("the policy stays as it was: %s", error)
        else:
            log.info("the policy was read again: %d tokens, %d users", len(self._policy.tokens), len(self._policy.uids))

    def of_uid(self, uid: int) -> Grant:
        """What a user of this host may do, by the kernel's word."""
        if self._policy is None or uid in (0, os.geteuid()):
            return EVERYTHING
        return self._policy.uids.get(uid, Grant())

    def of_bearer(self, header: str) -> Grant:
        """What the sender of an authorization header may do. Raises Unauthenticated."""
        if self._policy is None:
            return EVERYTHING
        grant = self._policy.of_token(header.removeprefix(BEARER)) if header.startswith(BEARER) else None
        if grant is None:
            raise Unauthenticated(
                "a bearer token that the policy knows is needed to open a session",
                field=AUTHORIZATION,
                expected="metadata authorization: Bearer TOKEN",
            )
        return grant


def _grant(number: int, entry: Any) -> Grant:
    if not isinstance(entry, dict) or set(entry) - ENTRY_KEYS:
        raise InvalidArgument(f"policy entry {number}", str(entry)[:80], f"keys {', '.join(sorted(ENTRY_KEYS))}")
    roles = []
    for text in _strings(number, entry, "roles"):
        try:
            roles.append(Role(text))
        except ValueError as error:
            raise InvalidArgument(f"policy entry {number}: roles", repr(text), ", ".join(Role)) from error
    patterns = _strings(number, entry, "namespaces")
    if not roles or not patterns:
        raise InvalidArgument(f"policy entry {number}", "no roles or no namespaces", "at least one of each")
    if Role.ADMIN in roles and patterns != ["*/*"]:
        raise InvalidArgument(f"policy entry {number}: namespaces", str(patterns), '["*/*"], since admin sees all')
    right = Right.WRITE if Role.WRITE in roles else Right.READ if Role.READ in roles else Right.NONE
    rules = []
    for pattern in patterns:
        tenant, slash, model = pattern.partition("/")
        if not (tenant and slash and model):
            raise InvalidArgument(f"policy entry {number}: namespaces", repr(pattern), "TENANT/MODEL, such as */llama*")
        rules.append((tenant, model, right))
    return Grant(tuple(rules), Role.ADMIN in roles)


def _strings(number: int, entry: dict[str, Any], key: str) -> list[str]:
    found = entry.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InvalidArgument(f"policy entry {number}: {key}", str(found)[:80], "a list of texts")
    return found


def _uids(number: int, entry: dict[str, Any]) -> list[int]:
    found = entry.get("uids", [])
    if not isinstance(found, list) or not all(type(item) is int and item >= 0 for item in found):
        raise InvalidArgument(f"policy entry {number}: uids", str(found)[:80], "a list of numbers")
    return found


def _digest(number: int, text: str) -> bytes:
    if len(text) != 64 or set(text.lower()) - set("0123456789abcdef"):
        raise InvalidArgument(f"policy entry {number}: token_sha256", text[:8] + "...", "64 hexadecimal digits")
    return bytes.fromhex(text)
