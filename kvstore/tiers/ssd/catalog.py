"""The namespaces kept on disk: specs, policies and names in one small file, replaced in one step.

::

    0   8   magic "KVSPACE1"
    8   4   version, 1
    12  4   bytes of the text
    16  4   CRC of the text
    20  4   CRC of bytes 0..20
    24      text: a JSON array of objects {"spec", "policy", "name"}; salt as hex; the spec's raw_layers in "policy"

The file is written as ``namespaces.tmp``, synced, renamed, and the directory synced, before the first block of a
new namespace is written. A spec's digest is computed again when it is read: it is never stored.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Durability, NamespaceId, WritePolicy
from kvstore.tiers.ssd.format import VERSION, refuse_version

CATALOG_NAME: Final = "namespaces"
_MAGIC: Final = b"KVSPACE1"
_HEAD: Final = struct.Struct("<8sIII")
_CRC: Final = struct.Struct("<I")


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


def pack_catalog(spaces: list[Space]) -> bytes:
    """The whole file."""
    text = json.dumps([_to_json(space) for space in spaces], sort_keys=True, indent=1).encode()
    fixed = _HEAD.pack(_MAGIC, VERSION, len(text), crc32c(text))
    return fixed + _CRC.pack(crc32c(fixed)) + text


def unpack_catalog(data: bytes) -> list[Space]:
    """Read and check the file; raises CorruptBlock, or TierUnavailable for a version not known."""
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
    except (ValueError, KeyError, TypeError, InvalidArgument) as error:
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
    return make_space(index, NamespaceSpec(**spec), NamespacePolicy(**policy), item["name"])
