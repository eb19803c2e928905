"""Copies with their checksums: C++ and numpy agree at every odd length, and what is stored checks out."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.namespace import BlockLayout, NamespacePolicy
from kvstore.core.types import BlockKey, Codec
from kvstore.kernels import native
from kvstore.store.moves import copies
from kvstore.store.moves.raw_copies import RawBlock, store_raw
from kvstore.store.tables.namespaces import Namespace
from kvstore.testing.world import SPEC
from kvstore.tiers.copying import PIECE, copy_with_crc

NAMESPACE = Namespace(0, SPEC.namespace_id, SPEC, BlockLayout.of(SPEC), NamespacePolicy())
KEY, PARENT = BlockKey(b"k" * 32), BlockKey(b"p" * 32)


@pytest.mark.parametrize("length", [1, 255, 4096, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_both_ways_copy_and_agree(length, monkeypatch):
    source = memoryview(np.random.default_rng(length).bytes(length))
    for there in {native.available(), False}:
        monkeypatch.setattr(native, "available", lambda there=there: there)
        out = memoryview(bytearray(length))
        assert copy_with_crc(out, source) == crc32c(source)
        assert out == source


def test_a_stored_block_checks_out_and_a_changed_one_does_not():
    layout = NAMESPACE.layout
    slices = memoryview(bytearray(np.random.default_rng(1).bytes(layout.layers * layout.raw_slice_stride)))
    stored = memoryview(bytearray(layout.raw_stored_bytes))
    store_raw(NAMESPACE, [RawBlock(KEY, PARENT, slices, stored)])
    copies.check_stored(NAMESPACE, KEY, Codec.RAW, stored, slices=True)
    for wrong in (
        lambda: copies.check_stored(NAMESPACE, PARENT, Codec.RAW, stored, slices=False),
        lambda: copies.check_stored(NAMESPACE, KEY, Codec.INT8, stored, slices=False),
    ):
        with pytest.raises(CorruptBlock):
            wrong()
    stored[layout.header_bytes + layout.raw_slice_stride] ^= 1
    copies.check_stored(NAMESPACE, KEY, Codec.RAW, stored, slices=False)
    with pytest.raises(CorruptBlock, match="slice 1 fails its checksum"):
        copies.check_stored(NAMESPACE, KEY, Codec.RAW, stored, slices=True)


@pytest.mark.parametrize("strides", [(512, 512), (512, 768)])
def test_slices_keep_their_bytes_at_other_distances(strides):
    source = memoryview(np.random.default_rng(1).bytes(3 * strides[0]))
    out = memoryview(bytearray(3 * strides[1]))
    copies.copy_slices(source, out, 3, 300, strides)
    for layer in range(3):
        at, to = layer * strides[0], layer * strides[1]
        assert out[to : to + 300] == source[at : at + 300]
