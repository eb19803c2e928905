"""The DEVICE tier without a GPU: a shared arena of the same shape, mapped read-only by every engine of the node.

What an engine writes it writes into its session's buffer; a commit copies it here. So no engine can damage a block.

Blocks here have no headers. ``encode`` and ``decode`` are where a raw block crosses to and from the stored form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area, Codec
from kvstore.tiers.base import DeviceArena
from kvstore.tiers.coding import copy_bytes, decode_block, encode_block
from kvstore.tiers.host import MemfdArena


class MemfdDeviceArena(MemfdArena):
    """DEVICE as shared memory; meets ``base.DeviceArena``."""

    kind = "memfd"

    def __init__(self, nbytes: int, *, populate: bool = True) -> None:
        super().__init__("kvstore-device", nbytes, Area.DEVICE, populate=populate)
        self.seal_read_only()

    def encode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, out: memoryview) -> Codec:
        """See ``base.DeviceArena.encode``."""
        raw = self.view(offset, layout.units_bytes(Codec.RAW))
        if codec is not Codec.RAW and encode_block(raw, out, layout, spec.geometry, codec):
            return codec
        # RAW was asked for, or the block holds values (NaN, Inf) that the codec can not.
        copy_bytes(raw, out)
        return Codec.RAW

    def decode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, source: memoryview) -> None:
        """See ``base.DeviceArena.decode``."""
        raw = self.view(offset, layout.units_bytes(Codec.RAW))
        if codec is not Codec.RAW:
            decode_block(source, raw, layout, spec.geometry, codec)
        else:
            copy_bytes(source[: len(raw)], raw)

    def read(self, offset: int, out: memoryview) -> None:
        """See ``base.DeviceArena.read``."""
        copy_bytes(self.view(offset, len(out)), out)

    def write(self, offset: int, source: memoryview) -> None:
        """See ``base.DeviceArena.write``."""
        copy_bytes(source, self.view(offset, len(source)))


if TYPE_CHECKING:

    def _meets(arena: MemfdDeviceArena) -> DeviceArena:
        return arena
