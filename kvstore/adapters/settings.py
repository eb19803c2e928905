"""What an engine's own configuration says of the store, the same words for every engine that has a place for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from kvstore.client import default_socket
from kvstore.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one adapter; those of one engine alone are fields of its subclass."""

    socket: str = ""
    """The daemon's session socket; empty for the one that all commands take by default."""
    buffer_bytes: int = 256 << 20
    """What is stored goes through this; what it has no room for is stored later."""
    deadline_s: float = 1.0
    """Longest that a daemon that hangs holds up the engine, once."""
    load_s: float = 10.0
    """How long a load waits for blocks that lie on SSD."""
    connect_s: float = 10.0
    """How long the start waits for the daemon."""
    revision: str = ""
    """Names the weights, instead of the files' names, sizes and times: two sets of weights must never share one."""
    salt: str = ""
    """Sets tenants apart."""

    @classmethod
    def read(cls, field: str, given: Mapping[str, Any]) -> Self:
        """What stands under ``field`` of the engine's configuration. Raises InvalidArgument for a name that is none."""
        names = {item.name for item in fields(cls)}
        unknown = sorted(set(given) - names)
        if unknown:
            raise InvalidArgument(field, ", ".join(unknown), f"some of {', '.join(sorted(names))}")
        found = cls(**given)
        return found if found.socket else replace(found, socket=str(default_socket()))
