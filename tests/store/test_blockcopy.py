"""Raw blocks of one call: what lies in HOST is what was written, with its checksums, natively and without."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec
from kvstore.kernels import native
from kvstore.store.moves import copies
from kvstore.store.moves.raw_copies import RawBlock, store_raw
from kvstore.store.tables.namespaces import Namespace


def namespace_of(slice_bytes):
    spec = NamespaceSpec(
        model="m", revision="r", dtype="opaque", layers=3, kv_heads=1, head_dim=1, block_tokens=4,
        opaque_slice_bytes=slice_bytes,
    )  # fmt: skip
    return Namespace(0, spec.namespace_id, spec, BlockLayout.of(spec), NamespacePolicy())


@pytest.mark.parametrize("slice_bytes", [300, 4096, 200_000])
@pytest.mark.parametrize("with_native", [True, False])
def test_blocks_of_one_call(monkeypatch, slice_bytes, with_native):
    if with_native and not native.available():
        pytest.skip("the C++ kernels are not built here")
    monkeypatch.setattr(native, "available", lambda: with_native)
    namespace = namespace_of(slice_bytes)
    layout, rng = namespace.layout, np.random.default_rng(slice_bytes)
    blocks = [
        RawBlock(
            bytes([number]) * 32,
            bytes([number + 100]) * 32,
            memoryview(rng.bytes(layout.layers * layout.raw_slice_stride)),
            memoryview(bytearray(layout.raw_stored_bytes)),
        )
        for number in range(3)
    ]
    store_raw(namespace, blocks)
    for block in blocks:
        copies.check_stored(namespace, block.key, Codec.RAW, block.stored, slices=True)
        for layer in range(layout.layers):
            begin = layer * layout.raw_slice_stride
            written = block.stored[layout.header_bytes + begin :][:slice_bytes]
            assert written == block.slices[begin : begin + slice_bytes]
        block.stored[layout.header_bytes + 2 * layout.raw_slice_stride] ^= 1
        with pytest.raises(copies.CorruptBlock):
            copies.check_stored(namespace, block.key, Codec.RAW, block.stored, slices=True)
