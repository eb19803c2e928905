"""Namespaces: the digest of everything that changes the bytes of a block, and the layout that follows.

``namespace_id = SHA-256(NAMESPACE_TAG || for each field in the order of NamespaceSpec: u32 length || bytes)``
with text as UTF-8, integers as unsigned little-endian of 8 bytes, and raw bytes as they are.
``docs/protocol.md`` has golden vectors.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field, fields
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Codec, Durability, NamespaceId, WritePolicy
from kvstore.kernels.layout import CODECS, DTYPE_BYTES, SLICE_ALIGNMENT, SliceGeometry, align_up

NAMESPACE_TAG: Final = b"kvstore.namespace.v1\x00"
LAYOUT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
LAYERS_MAX: Final = 1024
BLOCK_BYTES_MAX: Final = 1 << 30

_TEXT_BYTES_MAX: Final = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """Everything that changes the bytes of a block; the field order is the digest's.

    For attention blocks ``opaque_slice_bytes`` is 0 and the geometry fields describe the slices. For a
    foreign engine's opaque payloads it is the bytes of one slice; the geometry then only tells specs apart.
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

    def __post_init__(self) -> None:
        self._check_text()
        self._check_numbers()
        if self.codec not in CODECS:
            raise InvalidArgument("spec.codec", repr(self.codec), f"one of {', '.join(CODECS)}")
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

    @property
    def namespace_id(self) -> NamespaceId:
        """The digest of this spec, 32 bytes."""
        digest = hashlib.sha256(NAMESPACE_TAG)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str):
                data = value.encode()
            elif isinstance(value, bytes):
                data = value
            else:
                data = struct.pack("<Q", value)
            digest.update(struct.pack("<I", len(data)))
            digest.update(data)
        return NamespaceId(digest.digest())

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
    try:
        canonical = canonical_json(json.loads(text))
    except ValueError as error:
        raise InvalidArgument(name, repr(text[:80]), f"canonical JSON ({error})") from error
    if canonical != text:
        raise InvalidArgument(name, repr(text[:80]), f"canonical JSON, {canonical[:80]!r}")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Byte counts of a namespace's blocks.

    A *stored* block (HOST, SSD) is a header of ``header_bytes`` (magic, key, codec, lengths, CRC-32C of each
    slice) followed by its slices at distances of ``slice_stride``. A block on DEVICE has raw slices only, at
    distances of ``raw_slice_stride``.
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

    @classmethod
    def of(cls, spec: NamespaceSpec) -> BlockLayout:
        """Compute the layout of a spec."""
        if spec.opaque_slice_bytes:
            coded = raw = spec.opaque_slice_bytes
        else:
            geometry = SliceGeometry(spec.kv_heads, spec.head_dim, spec.block_tokens, spec.dtype)
            coded, raw = geometry.slice_bytes(spec.codec), geometry.raw_bytes
        stride, raw_stride = align_up(coded, SLICE_ALIGNMENT), align_up(raw, SLICE_ALIGNMENT)
        header = align_up(HEADER_FIXED_BYTES + 4 * spec.layers, PAGE_BYTES)
        return cls(
            layers=spec.layers,
            slice_bytes=coded,
            slice_stride=stride,
            raw_slice_bytes=raw,
            raw_slice_stride=raw_stride,
            header_bytes=header,
            stored_bytes=align_up(header + spec.layers * stride, PAGE_BYTES),
            raw_stored_bytes=align_up(header + spec.layers * raw_stride, PAGE_BYTES),
            device_bytes=align_up(spec.layers * raw_stride, PAGE_BYTES),
        )

    def of_codec(self, codec: Codec) -> tuple[int, int, int]:
        """Slice bytes, slice stride and stored bytes of a block that was kept under ``codec``."""
        if codec is Codec.RAW:
            return self.raw_slice_bytes, self.raw_slice_stride, self.raw_stored_bytes
        return self.slice_bytes, self.slice_stride, self.stored_bytes


HEADER_FIXED_BYTES: Final = 256
"""Bytes of a stored block's header before its list of slice checksums (``tiers/header.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacePolicy:
    """How a namespace is kept; no part of its identity."""

    write: WritePolicy = WritePolicy.THROUGH
    durability: Durability = Durability.MEMORY
    raw_layers: tuple[int, ...] = field(default=())
    raw_first_tokens: int = 0
    lossless: str = ""

    def __post_init__(self) -> None:
        if self.lossless not in ("", "lz4"):
            raise InvalidArgument("policy.lossless", repr(self.lossless), '"" or "lz4"')
        if self.raw_first_tokens < 0:
            raise InvalidArgument("policy.raw_first_tokens", self.raw_first_tokens, "0 or more")
