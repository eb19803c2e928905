"""Blocks under INT8 with layers that stay raw: offsets, bytes, checksums, for random sets of raw layers."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import ROOT_PARENT, Codec
from kvstore.kernels import quant
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.coding import decode_block, encode_block
from kvstore.tiers.ssd import SsdConfig, SsdTier

SPEC = NamespaceSpec(model="mixed", dtype="float16", layers=7, kv_heads=2, head_dim=8, block_tokens=8, codec="int8")


def spec_of(seed: int) -> NamespaceSpec:
    chance = random.Random(seed)
    layers = chance.randint(1, 12)
    raw = tuple(sorted(chance.sample(range(layers), chance.randint(0, layers))))
    return replace(
        SPEC,
        layers=layers,
        dtype=chance.choice(["float16", "float32", "bfloat16"]),
        kv_heads=chance.choice([1, 2, 3]),
        head_dim=chance.choice([8, 12, 64]),
        block_tokens=chance.choice([8, 64]),
        raw_layers=raw,
    )


def raw_block(spec: NamespaceSpec, seed: int) -> bytearray:
    """Raw slices at their stride, of normal numbers; noise between them."""
    layout = BlockLayout.of(spec)
    rng = np.random.default_rng(seed)
    data = bytearray(rng.bytes(layout.units_bytes(Codec.RAW)))
    for layer in range(spec.layers):
        count = layout.raw_slice_bytes // spec.geometry.itemsize
        values = rng.standard_normal(count).astype(np.float32)
        packed = values.view(np.uint32) >> 16 if spec.dtype == "bfloat16" else values.astype(spec.dtype)
        begin = layout.layer_offset(Codec.RAW, layer)
        data[begin : begin + layout.raw_slice_bytes] = (
            packed.astype(np.uint16) if spec.dtype == "bfloat16" else packed
        ).tobytes()
    return data


@pytest.mark.parametrize("seed", range(24))
def test_each_layer_is_where_the_layout_says_and_round_trips(seed):
    spec = spec_of(seed)
    layout, geometry = BlockLayout.of(spec), spec.geometry
    raw = raw_block(spec, seed)
    coded = bytearray(b"\xee" * layout.units_bytes(Codec.INT8))
    assert encode_block(memoryview(raw), memoryview(coded), layout, geometry)
    back = bytearray(layout.units_bytes(Codec.RAW))
    decode_block(memoryview(coded), memoryview(back), layout, geometry)
    for layer in range(spec.layers):
        at, begin = layout.layer_offset(Codec.RAW, layer), layout.layer_offset(Codec.INT8, layer)
        end = layout.layer_offset(Codec.INT8, layer + 1)
        own = raw[at : at + layout.raw_slice_bytes]
        if layer in spec.raw_layers:
            assert coded[begin:end] == own.ljust(end - begin, b"\0")
            assert back[at : at + layout.raw_slice_bytes] == own
            continue
        alone, again = bytearray(geometry.int8_bytes), bytearray(geometry.raw_bytes)
        assert quant.quantise(own, alone, geometry, 1)
        quant.dequantise(alone, again, geometry, 1)
        assert coded[begin : begin + geometry.int8_bytes] == alone
        assert end - begin == layout.slice_stride
        if spec.raw_layers:
            assert not any(coded[begin + geometry.int8_bytes : end])
        assert back[at : at + layout.raw_slice_bytes] == again


def test_a_block_with_nan_is_refused_only_where_an_int8_layer_holds_it():
    spec = replace(SPEC, raw_layers=(1,))
    layout = BlockLayout.of(spec)
    for layer, taken in ((1, True), (2, False)):
        raw = raw_block(spec, 1)
        begin = layout.layer_offset(Codec.RAW, layer)
        raw[begin : begin + 2] = b"\x00\x7e"
        out = bytearray(layout.units_bytes(Codec.INT8))
        assert encode_block(memoryview(raw), memoryview(out), layout, spec.geometry) is taken


def test_without_raw_layers_the_layout_is_the_plain_one():
    layout = BlockLayout.of(SPEC)
    assert (layout.slice_bytes, layout.raw_layer_units) == (SPEC.geometry.int8_bytes, 1)
    for codec in Codec:
        assert [layout.layer_offset(codec, layer) for layer in range(8)] == [
            layer * layout.of_codec(codec)[1] for layer in range(8)
        ]
        assert layout.unit_range(codec, (2, 5)) == (2, 5)


def test_the_sizes_of_smollm2():
    spec = replace(SPEC, layers=30, kv_heads=3, head_dim=64, block_tokens=64, raw_layers=(0, 29))
    layout = BlockLayout.of(spec)
    assert (layout.raw_slice_bytes, layout.slice_stride, layout.raw_layer_units) == (49152, 26112, 2)
    assert layout.units_of(Codec.INT8) == 32
    assert layout.unit_range(Codec.INT8, (1, 30)) == (2, 32)
    assert layout.units_of(Codec.RAW) == 30
    assert BlockLayout.of(replace(spec, dtype="float32")).raw_layer_units == 4
    many = BlockLayout.of(replace(spec, layers=1024, kv_heads=1, raw_layers=tuple(range(1024))))
    assert many.header_bytes == 12288


@pytest.mark.parametrize("layers", [(0, 7), (0, 1), (2, 5), (6, 7)])
def test_the_disk_reads_ranges_of_units(layers):
    maker = BlockMaker(replace(SPEC, raw_layers=(0, 3, 6)))
    config = SsdConfig(
        capacity_bytes=1 << 20, read_threads=1, write_threads=1, commit_interval_s=None, compact_interval_s=None,
        io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072,
    )  # fmt: skip
    tier = SsdTier("memory", config, port=FaultyDisk())
    list(tier.recover())
    tier.put_namespace(maker.spec, NamespacePolicy(), "")
    blocks = maker.chain([1, 2], ROOT_PARENT, Codec.INT8)
    handles = tier.write(maker.namespace_id, blocks, durable=True)
    assert [spec for spec, _, _ in tier.namespaces()] == [maker.spec]
    layout = maker.layout
    begin, end = layout.unit_range(Codec.INT8, layers)
    into = memoryview(bytearray((end - begin) * layout.slice_stride))
    assert tier.read([BlockRead(handles[1], blocks[1].key, into, (begin, end))]) == [ReadStatus.OK]
    at = layout.header_bytes + layout.layer_offset(Codec.INT8, layers[0])
    assert into == blocks[1].stored[at : at + len(into)]
    tier.close()
