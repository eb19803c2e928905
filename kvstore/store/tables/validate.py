"""Checks of arguments: each raises InvalidArgument naming the field, the value and what would be right."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import block_key
from kvstore.core.types import BATCH_KEYS_MAX, KEY_BYTES, BlockKey, Tier
from kvstore.store.tables.namespaces import Namespace

_KEY_LENGTHS = ({KEY_BYTES}, set[int]())

WAIT_MS_MAX = 3_600_000
LEASE_NAME_BYTES_MAX = 256


def check_keys(keys: Sequence[BlockKey], *, unique: bool = False, field: str = "keys") -> None:
    """At most BATCH_KEYS_MAX keys of 32 bytes each; with ``unique`` no key twice."""
    if len(keys) > BATCH_KEYS_MAX:
        raise InvalidArgument(field, f"{len(keys)} keys", f"at most {BATCH_KEYS_MAX} a call")
    if set(map(len, keys)) not in _KEY_LENGTHS:
        wrong = next(i for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidArgument(f"{field}[{wrong}]", f"{len(keys[wrong])} bytes", f"{KEY_BYTES} bytes")
    if unique and len(set(keys)) != len(keys):
        seen: set[BlockKey] = set()
        for i, key in enumerate(keys):
            if key in seen:
                raise InvalidArgument(f"{field}[{i}]", f"{key.hex()[:16]} again", "each key once")
            seen.add(key)


def check_tier(tier: Tier, allowed: Sequence[Tier]) -> None:
    """``tier`` is one of ``allowed``."""
    if tier not in allowed:
        raise InvalidArgument("tier", getattr(tier, "name", tier), " or ".join(t.name for t in allowed))


def check_reserve(keys: Sequence[BlockKey], count: int) -> None:
    """Keys or a count, not both and not neither."""
    if keys and count:
        raise InvalidArgument("count", count, "0 when keys are given")
    if not keys and not 1 <= count <= BATCH_KEYS_MAX:
        raise InvalidArgument("count", count, f"1 to {BATCH_KEYS_MAX} when no keys are given")
    check_keys(keys, unique=True)


def check_layers(layers: tuple[int, int] | None, count: int) -> tuple[int, int]:
    """The half-open range of layers, all of them for None."""
    if layers is None:
        return 0, count
    begin, end = layers
    if not 0 <= begin < count:
        raise InvalidArgument("layer_begin", begin, f"0 to {count - 1}")
    if not begin < end <= count:
        raise InvalidArgument("layer_end", end, f"{begin + 1} to {count}")
    return begin, end


def check_wait(field: str, milliseconds: int) -> None:
    """A wait of 0 to an hour."""
    if not 0 <= milliseconds <= WAIT_MS_MAX:
        raise InvalidArgument(field, milliseconds, f"0 to {WAIT_MS_MAX}")


def check_lease(name: str, ttl_ms: int) -> None:
    """A lease's name and time; one that is longer than the longest is granted shorter."""
    if len(name.encode()) > LEASE_NAME_BYTES_MAX:
        raise InvalidArgument("name", f"{len(name.encode())} bytes", f"at most {LEASE_NAME_BYTES_MAX} bytes")
    if ttl_ms < 1:
        raise InvalidArgument("ttl_ms", ttl_ms, "1 or more")


def check_commit(namespace: Namespace, entries: Sequence[CommitEntry], token_ids: Sequence[int]) -> None:
    """Keys and parents well-formed, no key or reservation twice, tokens (if any) those of the keys."""
    # One loop, which calls nothing for an entry.
    keys: list[BlockKey] = []
    parents: list[BlockKey] = []
    numbers: set[int] = set()
    position: dict[BlockKey, int] = {}
    for i, entry in enumerate(entries):
        keys.append(entry.key)
        parents.append(entry.parent)
        numbers.add(entry.reservation_id)
        position[entry.key] = i
    check_keys(keys, unique=True)
    check_keys(parents, field="parents")
    if len(numbers) != len(entries):
        raise InvalidArgument("reservation_ids", "one of them twice", "each reservation once")
    for i, entry in enumerate(entries):
        if position.get(entry.parent, -1) >= i:
            raise InvalidArgument(f"parents[{i}]", f"entry {position[entry.parent]}", "an entry before its child")
    if not token_ids:
        return
    tokens = namespace.spec.block_tokens
    if len(token_ids) != len(entries) * tokens:
        raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", f"{len(entries)} x {tokens}, or none")
    for i, entry in enumerate(entries):
        right = block_key(namespace.namespace_id, entry.parent, token_ids[i * tokens : (i + 1) * tokens])
        if right != entry.key:
            raise InvalidArgument(f"keys[{i}]", entry.key.hex(), f"{right.hex()}, the key of its tokens and parent")


def check_session(name: str, buffer_bytes: int, buffer_bytes_max: int) -> None:
    """A session's name and the size of its buffer."""
    if len(name.encode()) > LEASE_NAME_BYTES_MAX:
        raise InvalidArgument("name", f"{len(name.encode())} bytes", f"at most {LEASE_NAME_BYTES_MAX} bytes")
    if buffer_bytes and not 4096 <= buffer_bytes <= buffer_bytes_max:
        raise InvalidArgument("buffer_bytes", buffer_bytes, f"0, or 4096 to {buffer_bytes_max}")


def check_count(field: str, count: int) -> None:
    """At most BATCH_KEYS_MAX entries."""
    if count > BATCH_KEYS_MAX:
        raise InvalidArgument(field, f"{count} entries", f"at most {BATCH_KEYS_MAX} a call")


def check_pin_name(name: str) -> None:
    """An operator's pin has a name: none is anonymous."""
    if not 1 <= len(name.encode()) <= LEASE_NAME_BYTES_MAX:
        raise InvalidArgument("name", f"{len(name.encode())} bytes", f"1 to {LEASE_NAME_BYTES_MAX} bytes")
