"""Messages to store values and back, for both ends of the wire.

Keys travel packed and places as columns, because a repeated message a key costs more than the call itself.
Values that come from a request are checked here where the message alone can tell that they are wrong; what
needs the store's tables is checked by the store. Enum fields that hold unknown numbers are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from typing import Final, TypeVar

from google.protobuf.message import Message

from kvstore.cache import NearNamespace
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import split_keys
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    BATCH_KEYS_MAX,
    KEY_BYTES,
    Area,
    BlockKey,
    Busy,
    Codec,
    Durability,
    NamespaceId,
    Outcome,
    Place,
    Reason,
    Target,
    Tier,
    WritePolicy,
)
from kvstore.v1 import cache_pb2, common_pb2

E = TypeVar("E", bound=IntEnum)

OUTCOMES: Final = (Outcome.MISS, *Outcome)
"""Outcome by wire number; an unset one reads as MISS."""

REASONS: Final = tuple(Reason)
AREAS: Final = tuple(Area)
CODECS: Final = tuple(Codec)

_NUMBERED: Final[dict[type[IntEnum], dict[int, IntEnum]]] = {
    kind: {int(item): item for item in kind} for kind in (Target, Tier, Durability, WritePolicy, Reason)
}
"""Members by number: asking the enum's class costs three calls."""

_NO_PLACE: Final = Place(Area.NONE, 0, 0)
_NEW_PLACE: Final[Callable[[Iterable[object]], Place]] = partial(tuple.__new__, Place)

_SPEC_FIELDS: Final = tuple(field.name for field in common_pb2.NamespaceSpec.DESCRIPTOR.fields)
_LAYOUT_FIELDS: Final = tuple(field.name for field in common_pb2.BlockLayout.DESCRIPTOR.fields)


# ---------------------------------------------------------------- checks of request fields


def enum_of(field: str, number: int, kind: type[E]) -> E:
    """Member of ``kind`` with this number; InvalidArgument naming the field if there is none."""
    found = _NUMBERED[kind].get(number)
    if found is None:
        known = ", ".join(f"{item.value} ({item.name})" for item in kind if item.value or kind in (Codec, Reason))
        raise InvalidArgument(field, number, f"one of {known}")
    return found  # type: ignore[return-value]


def namespace_of(data: bytes, field: str = "namespace_id") -> NamespaceId:
    """A namespace id of 32 bytes."""
    if len(data) != KEY_BYTES:
        raise InvalidArgument(field, f"{len(data)} bytes", f"{KEY_BYTES} bytes, the id that OpenNamespace answered")
    return NamespaceId(data)


def keys_of(packed: bytes, field: str = "keys", *, empty: bool = False) -> list[BlockKey]:
    """Packed keys as a list: 1 to 4,096 of them, all different; none at all only with ``empty``."""
    keys = split_keys(field, packed)
    if len(keys) > BATCH_KEYS_MAX:
        raise InvalidArgument(field, f"{len(keys)} keys", f"at most {BATCH_KEYS_MAX} keys a call")
    if not keys and not empty:
        raise InvalidArgument(field, "empty", f"1 to {BATCH_KEYS_MAX} keys of {KEY_BYTES} bytes")
    if len(set(keys)) != len(keys):
        seen = set[BlockKey]()
        # add() answers None, so each key is entered as it is looked at.
        twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidArgument(field, f"{twice.hex()[:16]} twice", "different keys")
    return keys


def target_of(namespace_id: bytes, packed: bytes) -> tuple[NamespaceId, Sequence[BlockKey]]:
    """The namespace and the keys of a request: 0 to 4,096, all different."""
    if len(namespace_id) != KEY_BYTES:
        namespace_of(namespace_id)
    if len(packed) == KEY_BYTES:
        # Nothing else has to hold for one key.
        return NamespaceId(namespace_id), (BlockKey(packed),)
    count = len(packed) // KEY_BYTES
    if len(packed) == count * KEY_BYTES and count <= BATCH_KEYS_MAX:
        keys: tuple[BlockKey, ...] = struct.unpack(f"{KEY_BYTES}s" * count, packed)
        if len(set(keys)) == count:
            return NamespaceId(namespace_id), keys
    return NamespaceId(namespace_id), keys_of(packed, empty=True)


def parents_of_entries(packed: bytes, count: int, field: str = "parents") -> Sequence[BlockKey]:
    """Packed parent keys, one for each of ``count`` keys; parents may repeat."""
    if count == 1 and len(packed) == KEY_BYTES:
        return (BlockKey(packed),)
    parents = split_keys(field, packed)
    if len(parents) != count:
        raise InvalidArgument(field, f"{len(parents)} keys", f"{count} keys, one for each of keys")
    return parents


def layers_of(begin: int, end: int) -> tuple[int, int] | None:
    """A half-open layer range; None for all layers (both 0). The store checks the upper bound."""
    if begin == 0 and end == 0:
        return None
    if begin >= end:
        raise InvalidArgument("layer_end", end, f"above layer_begin, which is {begin}; or both 0 for all layers")
    return begin, end


# ---------------------------------------------------------------- namespaces


def spec_of(message: common_pb2.NamespaceSpec) -> NamespaceSpec:
    """Spec of a message; NamespaceSpec itself checks every field."""
    values = {name: getattr(message, name) for name in _SPEC_FIELDS}
    return NamespaceSpec(**{**values, "raw_layers": tuple(message.raw_layers)})


def spec_message(spec: NamespaceSpec) -> common_pb2.NamespaceSpec:
    """Message of a spec."""
    return common_pb2.NamespaceSpec(**{name: getattr(spec, name) for name in _SPEC_FIELDS})


def policy_of(message: common_pb2.NamespacePolicy) -> NamespacePolicy:
    """Policy of a message; unset enums become the defaults."""
    default = NamespacePolicy()
    write = enum_of("policy.write", message.write, WritePolicy) if message.write else default.write
    durability = enum_of("policy.durability", message.durability, Durability) if message.durability else None
    return NamespacePolicy(
        write=write,
        durability=durability or default.durability,
        raw_first_tokens=message.raw_first_tokens,
        lossless=message.lossless,
        device_codec=message.device_codec or default.device_codec,
    )


def policy_message(policy: NamespacePolicy) -> common_pb2.NamespacePolicy:
    """Message of a policy."""
    return common_pb2.NamespacePolicy(
        write=int(policy.write),  # type: ignore[arg-type]
        durability=int(policy.durability),  # type: ignore[arg-type]
        raw_first_tokens=policy.raw_first_tokens,
        lossless=policy.lossless,
        device_codec=policy.device_codec,
    )


def layout_message(layout: BlockLayout) -> common_pb2.BlockLayout:
    """Message of a layout."""
    return common_pb2.BlockLayout(**{name: getattr(layout, name) for name in _LAYOUT_FIELDS})


def near_messages(near: Iterable[NearNamespace]) -> list[cache_pb2.NearNamespace]:
    """Messages of near namespaces."""
    return [cache_pb2.NearNamespace(namespace_id=n.namespace_id, fields=n.fields, blocks=n.blocks) for n in near]


def near_of(messages: Iterable[cache_pb2.NearNamespace]) -> tuple[NearNamespace, ...]:
    """Near namespaces of messages."""
    return tuple(NearNamespace(NamespaceId(m.namespace_id), tuple(m.fields), m.blocks) for m in messages)


# ---------------------------------------------------------------- outcomes and places


def fill_places(message: common_pb2.Places, places: Sequence[Place | None]) -> None:
    """Write places as columns; no columns at all where every place is None."""
    if not any(places):
        return
    if None in places:
        places = [place or _NO_PLACE for place in places]
    areas, offsets, strides, codecs, versions = zip(*places, strict=True)
    message.areas.extend(areas)
    message.offsets.extend(offsets)
    message.strides.extend(strides)
    message.codecs.extend(codecs)
    message.versions.extend(versions)


def places_of(message: common_pb2.Places, count: int) -> tuple[Place | None, ...]:
    """Places of columns, ``count`` of them."""
    numbers = message.areas[:]
    if not numbers:
        return (None,) * count
    areas, codecs = members(AREAS, numbers), members(CODECS, message.codecs[:])
    # A daemon from before versions sends none.
    versions = message.versions[:] or [0] * len(numbers)
    columns = zip(areas, message.offsets[:], message.strides[:], codecs, versions, strict=True)
    # As Place(*column), which takes three times as long: calls bring hundreds.
    places = tuple(map(_NEW_PLACE, columns))
    return places if 0 not in numbers else tuple([place if place.area else None for place in places])


def members(kind: Sequence[E], numbers: Sequence[int]) -> tuple[E, ...]:
    """Members of OUTCOMES, REASONS and their like by number. Most columns have the same number everywhere."""
    if numbers and numbers.count(numbers[0]) == len(numbers):
        return (kind[numbers[0]],) * len(numbers)
    return tuple([kind[number] for number in numbers])


def fill_busy(message: Message, busy: Busy | None) -> None:
    """Write what an allocation needed and found into ``message.busy``; leaves it unset for None."""
    if busy is None:
        return
    target = message.busy  # type: ignore[attr-defined]
    target.tier = int(busy.tier)
    target.needed_bytes = busy.needed_bytes
    target.free_bytes = busy.free_bytes
    target.evictable_bytes = busy.evictable_bytes
    target.reason = int(busy.reason)


def busy_of(message: Message) -> Busy | None:
    """The Busy of a reply, None if unset."""
    if not message.HasField("busy"):
        return None
    source = message.busy  # type: ignore[attr-defined]
    return Busy(
        Tier(source.tier or Tier.HOST),
        source.needed_bytes,
        source.free_bytes,
        source.evictable_bytes,
        REASONS[source.reason],
    )
