"""Checks that several rows make of their requests; each raises InvalidArgument naming the field."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import LeaseId, Tier
from kvstore.wire import messages
from kvstore.wire.verbs.base import WAIT_MS_MAX

NAME_BYTES_MAX = 256
"""Longest name of a lease, a session or a pin."""


def arena_tier(number: int) -> Tier:
    """A tier that is memory."""
    tier = messages.enum_of("tier", number, Tier)
    if tier not in (Tier.DEVICE, Tier.HOST):
        raise InvalidArgument("tier", f"{number} ({tier.name})", "TIER_DEVICE or TIER_HOST")
    return tier


def wait_of(field: str, value: int) -> int:
    """A wait of WAIT_MS_MAX at most."""
    if value > WAIT_MS_MAX:
        raise InvalidArgument(field, value, f"at most {WAIT_MS_MAX} ms")
    return value


def lease_of(number: int) -> LeaseId:
    """A lease id that is not 0."""
    if not number:
        raise InvalidArgument("lease_id", 0, "the id of a lease of this session, from GrantLease")
    return LeaseId(number)


def name_of(field: str, name: str, *, empty: bool = True) -> str:
    """A name for people, bounded."""
    size = len(name.encode())
    if size > NAME_BYTES_MAX:
        raise InvalidArgument(field, f"{size} bytes", f"at most {NAME_BYTES_MAX} bytes")
    if not name and not empty:
        raise InvalidArgument(field, "empty", f"1 to {NAME_BYTES_MAX} bytes")
    return name


def different(field: str, ids: Sequence[int]) -> None:
    """No id twice."""
    if len(set(ids)) != len(ids):
        raise InvalidArgument(field, "one id twice", "different ids")
