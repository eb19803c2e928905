"""The namespaces kept on disk: specs, policies and names, a line each, in two files that say the same.

::

    line    CRC-32C of the JSON as 8 hexadecimal digits, a space, JSON, a line feed
    first   {"catalog": 2}
    others  {"spec", "policy", "name"}; salt as hex; the spec's raw_layers in "policy"

A line is valid if and only if its CRC is right and its JSON makes a spec. A later line of a namespace takes the place
of an earlier one. Lines are appended to ``namespaces``, synced, then to ``namespaces.copy``, synced, before the first
block of a new namespace is written; so a torn end, or damage anywhere in one of the files, loses nothing, and damage
to the same line in both loses that namespace alone. What is not valid behind the last valid line is a torn end, which
a crash explains. Files of version 1 (one JSON array under one CRC, no copy) are read, and replaced when the next
namespace is added. A spec's digest is computed again when it is read: it is never stored. Journals and checkpoints
name namespaces by digest, so the order of lines means nothing.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Durability, NamespaceId, WritePolicy
from kvstore.tiers.ssd.format import VERSION, refuse_version

CATALOG_NAME: Final = "namespaces"
CATALOG_COPY: Final = "namespaces.copy"
VERSION_LINES: Final = 2
_MAGIC: Final = b"KVSPACE1"
_HEAD: Final = struct.Struct("<8sIII")
_CRC: Final = struct.Struct("<I")
_TYPES: Final = {"str": str, "int": int, "bytes": bytes}
_KINDS: Final = {
    kind: [(one.name, _TYPES[str(one.type)]) for one in dataclasses.fields(kind) if str(one.type) in _TYPES]
    for kind in (NamespaceSpec, NamespacePolicy)
}
"""Fields whose type JSON can miss, and that type."""


NO_SPEC: Final = (
    ArithmeticError, AttributeError, InvalidArgument, LookupError, RecursionError, TypeError, ValueError, struct.error,
)  # fmt: skip
"""What JSON that makes no spec raises."""


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace that this tier holds blocks of; ``index`` is its place in the catalog."""

    index: int
    namespace_id: NamespaceId
    spec: NamespaceSpec
    policy: NamespacePolicy
    name: str
    layout: BlockLayout


def make_space(index: int, spec: NamespaceSpec, policy: NamespacePolicy, name: str) -> Space:
    """A space with its digest and layout."""
    return Space(index, spec.namespace_id, spec, policy, name, BlockLayout.of(spec))


def pack_catalog(spaces: Iterable[Space]) -> bytes:
    """The whole file."""
    return _line({"catalog": VERSION_LINES}) + b"".join(map(pack_space, spaces))


def pack_space(space: Space) -> bytes:
    """The line of one namespace."""
    return _line(_to_json(space))


def _line(item: dict[str, Any]) -> bytes:
    text = json.dumps(item, sort_keys=True, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32c(text), text)


@dataclass(frozen=True, slots=True)
class Catalog:
    """What one or both files say; ``damage`` is the count of their lines that are not valid."""

    spaces: list[Space]
    damage: int = 0
    lines: bool = True
    """Whether lines can be appended; else the files have to be written anew first."""


def unpack_catalog(data: bytes, copy: bytes | None = None) -> Catalog:
    """Read and check the files. CorruptBlock if nothing in them is valid, TierUnavailable for a version not known."""
    if data[:8] == _MAGIC:
        return Catalog(_unpack_first(data), lines=False)
    found: dict[NamespaceId, Space] = {}
    good: dict[bytes, Space] = {}
    damage, torn, begun = 0, False, False
    for text in (data, copy or b""):
        bad = 0
        for line in filter(None, text.split(b"\n")):
            again = good.get(line)
            if again is not None:
                # Most lines stand in both files: they are parsed once.
                found[again.namespace_id] = again
                damage, bad = damage + bad, 0
                continue
            item = _read_line(line)
            space = None if item is None or "catalog" in item else _space_of(len(found), item)
            if space is not None:
                before = found.get(space.namespace_id)
                good[line] = space if before is None else replace(space, index=before.index)
                found[space.namespace_id] = good[line]
            elif item is not None and "catalog" in item:
                begun = True
                if item["catalog"] != VERSION_LINES:
                    raise refuse_version(CATALOG_NAME, item["catalog"])
            else:
                bad += 1
                continue
            # Valid lines behind a bad one: no torn end, but damage.
            damage, bad = damage + bad, 0
        torn = torn or bad > 0 or not text.endswith(b"\n")
    if not begun and not found:
        raise CorruptBlock(f"{CATALOG_NAME} holds {len(data)} bytes and no valid line", field="crc")
    return Catalog(list(found.values()), damage, lines=not damage and not torn)


def _read_line(line: bytes) -> dict[str, Any] | None:
    digits, _, text = line.partition(b" ")
    if len(digits) != 8 or digits != b"%08x" % crc32c(text):
        return None
    try:
        item = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return item if isinstance(item, dict) else None


def _space_of(index: int, item: dict[str, Any]) -> Space | None:
    try:
        return _from_json(index, item)
    except NO_SPEC:
        return None


def _unpack_first(data: bytes) -> list[Space]:
    """A file of version 1."""
    if len(data) < _HEAD.size + 4:
        raise CorruptBlock(f"{CATALOG_NAME} holds {len(data)} bytes", field="length")
    magic, version, length, text_crc = _HEAD.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    if magic != _MAGIC or crc != crc32c(data[: _HEAD.size]):
        raise CorruptBlock(f"the head of {CATALOG_NAME} is damaged", field="crc")
    if version != VERSION:
        raise refuse_version(CATALOG_NAME, version)
    text = data[_HEAD.size + 4 :]
    if len(text) != length or crc32c(text) != text_crc:
        raise CorruptBlock(f"the text of {CATALOG_NAME} is damaged", field="text")
    try:
        return [_from_json(index, item) for index, item in enumerate(json.loads(text))]
    except NO_SPEC as error:
        raise CorruptBlock(f"the text of {CATALOG_NAME} does not parse: {error}", field="text") from error


def _to_json(space: Space) -> dict[str, Any]:
    spec = dataclasses.asdict(space.spec)
    spec["salt"] = space.spec.salt.hex()
    policy = dataclasses.asdict(space.policy)
    policy["raw_layers"] = spec.pop("raw_layers")
    if policy["device_codec"] == "raw":
        # As catalogs were before there was a choice.
        del policy["device_codec"]
    policy["write"] = space.policy.write.name
    policy["durability"] = space.policy.durability.name
    return {"spec": spec, "policy": policy, "name": space.name}


def _from_json(index: int, item: dict[str, Any]) -> Space:
    spec = dict(item["spec"])
    spec["salt"] = bytes.fromhex(spec["salt"])
    policy = dict(item["policy"])
    policy["write"] = WritePolicy[policy["write"]]
    policy["durability"] = Durability[policy["durability"]]
    spec["raw_layers"] = tuple(policy.pop("raw_layers"))
    if not isinstance(item["name"], str):
        raise TypeError(f"the name is {item['name']!r}")
    made = make_space(index, NamespaceSpec(**spec), NamespacePolicy(**policy), item["name"])
    for value in (made.spec, made.policy):
        _check_types(value)
    return made


def _check_types(value: NamespaceSpec | NamespacePolicy) -> None:
    """JSON has numbers and truths where texts should be, and the classes trust their callers."""
    for name, kind in _KINDS[type(value)]:
        if type(getattr(value, name)) is not kind:
            raise TypeError(f"{name} is {getattr(value, name)!r}")
