"""Namespaces: the digest of everything that changes the bytes of a block, and the layout that follows.

``namespace_id = SHA-256(NAMESPACE_TAG || for each field in the order of NamespaceSpec: u32 length || bytes)``
with text as UTF-8, integers as unsigned little-endian of 8 bytes, and raw bytes as they are. ``raw_layers`` is last:
its numbers as unsigned little-endian of 4 bytes each, left out altogether if there are none. ``docs/protocol.md`` has
golden vectors.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from bisect import bisect_left
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Codec, Durability, NamespaceId, WritePolicy
from kvstore.kernels import codecs
from kvstore.kernels.layout import DTYPE_BYTES, SLICE_ALIGNMENT, SliceGeometry, align_up

NAMESPACE_TAG: Final = b"kvstore.namespace.v1\x00"
LAYOUT_VERSION: Final = 1
PAGE_BITS: Final = 12
PAGE_BYTES: Final = 1 << PAGE_BITS
"""Memory is handed out in pages, each of which has a version."""

LAYERS_MAX: Final = 1024
BLOCK_BYTES_MAX: Final = 1 << 30

_TEXT_BYTES_MAX: Final = 16384
_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')
JSON_DEPTH_MAX: Final = 64
"""How deep arrays and objects of ``rope`` and ``extra`` may lie in each other, since parsers recurse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """Everything that changes the bytes of a block; the field order is the digest's.

    For attention blocks ``opaque_slice_bytes`` is 0 and the geometry fields describe the slices. For a
    foreign engine's opaque payloads it is the bytes of one slice; the geometry then only tells specs apart.
    ``raw_layers`` are the layers that stay raw in blocks under another codec, ascending.
    Invalid values raise ``InvalidArgument`` naming the field.
    """

    model: str
    revision: str = ""
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 64
    rope: str = ""
    layout_version: int = LAYOUT_VERSION
    codec: str = "raw"
    shard_index: int = 0
    shard_count: int = 1
    salt: bytes = b""
    opaque_slice_bytes: int = 0
    extra: str = ""
    raw_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_text()
        self._check_numbers()
        if self.codec not in codecs.words():
            raise InvalidArgument("spec.codec", repr(self.codec), f"one of {', '.join(codecs.words())}")
        self._check_raw_layers()
        if self.opaque_slice_bytes and self.codec != "raw":
            raise InvalidArgument("spec.codec", repr(self.codec), "raw, since opaque payloads are never encoded")
        if not self.opaque_slice_bytes and self.dtype not in DTYPE_BYTES:
            raise InvalidArgument("spec.dtype", repr(self.dtype), f"one of {', '.join(sorted(DTYPE_BYTES))}")
        if self.layout_version != LAYOUT_VERSION:
            raise InvalidArgument("spec.layout_version", self.layout_version, str(LAYOUT_VERSION))
        stored = BlockLayout.of(self).stored_bytes
        if stored > BLOCK_BYTES_MAX:
            raise InvalidArgument("spec", f"a block of {stored} bytes", f"at most {BLOCK_BYTES_MAX} bytes a block")

    def _check_text(self) -> None:
        for name in ("model", "dtype"):
            if not getattr(self, name):
                raise InvalidArgument(f"spec.{name}", "empty", "a non-empty name")
        for item in fields(self):
            value = getattr(self, item.name)
            size = len(value.encode()) if isinstance(value, str) else len(value) if isinstance(value, bytes) else 0
            if size > _TEXT_BYTES_MAX:
                raise InvalidArgument(f"spec.{item.name}", f"{size} bytes", f"at most {_TEXT_BYTES_MAX} bytes")
        for name in ("rope", "extra"):
            check_canonical_json(f"spec.{name}", getattr(self, name))

    def _check_numbers(self) -> None:
        bounds = {
            "layers": (1, LAYERS_MAX),
            "kv_heads": (1, 4096),
            "head_dim": (1, 4096),
            "block_tokens": (1, 4096),
            "shard_count": (1, 65536),
            "shard_index": (0, self.shard_count - 1),
            "opaque_slice_bytes": (0, BLOCK_BYTES_MAX),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(f"spec.{name}", value, f"{low} to {high}")

    def _check_raw_layers(self) -> None:
        given = self.raw_layers
        if given and self.codec == "raw":
            raise InvalidArgument("spec.raw_layers", given, "empty, since all layers are raw under the codec raw")
        if given and not codecs.row_of(self.codec).mixes:
            raise InvalidArgument("spec.raw_layers", given, f"empty, since {self.codec} has all layers or none")
        if list(given) != sorted(set(given)):
            raise InvalidArgument("spec.raw_layers", given, "ascending numbers, each once")
        if given and not 0 <= given[0] <= given[-1] < self.layers:
            raise InvalidArgument("spec.raw_layers", given, f"0 to {self.layers - 1} each")

    @property
    def namespace_id(self) -> NamespaceId:
        """The digest of this spec, 32 bytes."""
        digest = hashlib.sha256(NAMESPACE_TAG)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, tuple):
                if not value:
                    continue
                data = struct.pack(f"<{len(value)}I", *value)
            elif isinstance(value, str):
                data = value.encode()
            elif isinstance(value, bytes):
                data = value
            else:
                data = struct.pack("<Q", value)
            digest.update(struct.pack("<I", len(data)))
            digest.update(data)
        return NamespaceId(digest.digest())

    @property
    def tenant(self) -> str:
        """The salt as text, "-" without one."""
        return self.salt.decode("utf-8", "backslashreplace") if self.salt else "-"

    @property
    def geometry(self) -> SliceGeometry:
        """Shape of one slice. Not for opaque payloads, which have none."""
        if self.opaque_slice_bytes:
            raise InvalidArgument(
                "spec.opaque_slice_bytes", self.opaque_slice_bytes, "0, since opaque slices have none"
            )
        return SliceGeometry(self.kv_heads, self.head_dim, self.block_tokens, self.dtype)

    def differing_fields(self, other: NamespaceSpec) -> tuple[str, ...]:
        """Names of the fields in which two specs differ, in digest order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


def canonical_json(value: object) -> str:
    """The one spelling of a JSON value that specs use: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def check_canonical_json(name: str, text: str) -> None:
    """Raise InvalidArgument unless ``text`` is empty or canonical JSON: one setting has one spelling."""
    if not text:
        return
    if _depth(text) > JSON_DEPTH_MAX:
        raise InvalidArgument(name, repr(text[:80]), f"JSON that is nested at most {JSON_DEPTH_MAX} deep")
    try:
        canonical = canonical_json(json.loads(text))
    except ValueError as error:
        raise InvalidArgument(name, repr(text[:80]), f"canonical JSON ({error})") from error
    if canonical != text:
        raise InvalidArgument(name, repr(text[:80]), f"canonical JSON, {canonical[:80]!r}")


def _depth(text: str) -> int:
    """How deep brackets outside of strings lie in each other; of text that is no JSON, too."""
    depth = deepest = 0
    for token in _BRACKETS.findall(text):
        if token in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in "]}":
            depth -= 1
    return deepest


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Byte counts of a namespace's blocks.

    A *stored* block (HOST, SSD) is a header of ``header_bytes`` (magic, key, codec, lengths, CRC-32C of each
    unit) followed by its units at distances of ``slice_stride``. A unit is a slice, but where some layers stay raw
    in coded blocks: there a raw layer takes ``raw_layer_units`` units, the end of the last of them zero, and
    ``slice_bytes`` is ``slice_stride``. A block on DEVICE has no header: raw slices at distances of
    ``raw_slice_stride``, or units.
    """

    layers: int
    slice_bytes: int
    slice_stride: int
    raw_slice_bytes: int
    raw_slice_stride: int
    header_bytes: int
    stored_bytes: int
    raw_stored_bytes: int
    device_bytes: int
    raw_layers: tuple[int, ...] = ()
    raw_layer_units: int = 1

    @classmethod
    def of(cls, spec: NamespaceSpec) -> BlockLayout:
        """The layout of a spec: one object for all specs of the same shape, of which tenants make many."""
        geometry = (spec.kv_heads, spec.head_dim, spec.block_tokens, spec.dtype)
        return _layout_of(spec.opaque_slice_bytes, geometry, spec.codec, spec.layers, tuple(spec.raw_layers))

    def of_codec(self, codec: Codec) -> tuple[int, int, int]:
        """Unit bytes, unit stride and stored bytes of a block that was kept under ``codec``."""
        if codec is Codec.RAW:
            return self.raw_slice_bytes, self.raw_slice_stride, self.raw_stored_bytes
        return self.slice_bytes, self.slice_stride, self.stored_bytes

    def units_before(self, codec: Codec, layer: int) -> int:
        """Units of the layers before ``layer`` (which may be ``layers``) in a block under ``codec``."""
        if codec is Codec.RAW or not self.raw_layers:
            return layer
        return layer + bisect_left(self.raw_layers, layer) * (self.raw_layer_units - 1)

    def units_of(self, codec: Codec) -> int:
        """Units of a block under ``codec``."""
        raw = 0 if codec is Codec.RAW else len(self.raw_layers)
        return self.layers + raw * (self.raw_layer_units - 1)

    def unit_range(self, codec: Codec, layers: tuple[int, int]) -> tuple[int, int]:
        """The half-open range of units of a half-open range of layers."""
        return self.units_before(codec, layers[0]), self.units_before(codec, layers[1])

    def layer_offset(self, codec: Codec, layer: int, first: int = 0) -> int:
        """Bytes from where layer ``first`` of a block begins to where ``layer`` does."""
        between = self.units_before(codec, layer) - self.units_before(codec, first)
        return between * (self.raw_slice_stride if codec is Codec.RAW else self.slice_stride)

    def layer_codec(self, codec: Codec, layer: int) -> Codec:
        """How one layer of a block under ``codec`` is encoded."""
        return Codec.RAW if layer in self.raw_layers else codec

    def units_bytes(self, codec: Codec) -> int:
        """Bytes of a block's units under ``codec``, padding included, without a header."""
        return self.layer_offset(codec, self.layers)


@lru_cache(maxsize=4096, typed=True)
def _layout_of(
    opaque_slice_bytes: int, geometry: tuple[int, int, int, str], codec: str, layers: int, raw_layers: tuple[int, ...]
) -> BlockLayout:
    """Compute a layout."""
    if opaque_slice_bytes:
        coded = raw = opaque_slice_bytes
    else:
        shape = SliceGeometry(*geometry)
        coded, raw = shape.slice_bytes(codec), shape.raw_bytes
    stride, raw_stride = align_up(coded, SLICE_ALIGNMENT), align_up(raw, SLICE_ALIGNMENT)
    raw_units = -(-raw // stride) if raw_layers else 1
    units = layers + len(raw_layers) * (raw_units - 1)
    header = align_up(HEADER_FIXED_BYTES + 4 * units, PAGE_BYTES)
    return BlockLayout(
        layers=layers,
        slice_bytes=stride if raw_layers else coded,
        slice_stride=stride,
        raw_slice_bytes=raw,
        raw_slice_stride=raw_stride,
        header_bytes=header,
        stored_bytes=align_up(header + units * stride, PAGE_BYTES),
        raw_stored_bytes=align_up(header + layers * raw_stride, PAGE_BYTES),
        device_bytes=align_up(layers * raw_stride, PAGE_BYTES),
        raw_layers=raw_layers,
        raw_layer_units=raw_units,
    )


HEADER_FIXED_BYTES: Final = 256
"""Bytes of a stored block's header before its list of slice checksums (``tiers/header.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePolicy:
    """How a namespace is kept; no part of its identity.

    ``device_codec`` is the codec of committed blocks on DEVICE: "raw", or the namespace's where attention reads that
    as it is.
    """

    write: WritePolicy = WritePolicy.THROUGH
    durability: Durability = Durability.MEMORY
    raw_first_tokens: int = 0
    lossless: str = ""
    device_codec: str = "raw"

    def __post_init__(self) -> None:
        if self.device_codec not in codecs.words():
            raise InvalidArgument("policy.device_codec", repr(self.device_codec), f"one of {', '.join(codecs.words())}")
        if self.lossless not in ("", "lz4"):
            raise InvalidArgument("policy.lossless", repr(self.lossless), '"" or "lz4"')
        if self.raw_first_tokens < 0:
            raise InvalidArgument("policy.raw_first_tokens", self.raw_first_tokens, "0 or more")
