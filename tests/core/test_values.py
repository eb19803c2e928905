"""Layouts, the header and the clock."""

from __future__ import annotations

import pytest

from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.namespace import JSON_DEPTH_MAX, BlockLayout, NamespaceSpec
from kvstore.core.types import BlockKey, Codec, NamespaceId, Tier
from kvstore.tiers.header import BlockHeader, check_header, first_bad_slice, pack_header, slice_crcs, unpack_header

SPEC = NamespaceSpec(model="m", dtype="float16", layers=3, kv_heads=3, head_dim=64)
LAYOUT = BlockLayout.of(SPEC)


def a_header(**changes) -> BlockHeader:
    values = {
        "codec": Codec.RAW, "layers": 3, "slice_bytes": LAYOUT.raw_slice_bytes, "slice_stride": LAYOUT.raw_slice_stride,
        "header_bytes": LAYOUT.header_bytes, "block_tokens": 64, "namespace_id": SPEC.namespace_id,
        "key": BlockKey(b"k" * 32), "parent": BlockKey(b"p" * 32), "slice_crcs": (1, 2, 3),
    }  # fmt: skip
    return BlockHeader(**{**values, **changes})


def test_a_header_reads_back_as_it_was_written():
    out = memoryview(bytearray(b"\xff" * LAYOUT.header_bytes))
    pack_header(a_header(), out)
    assert unpack_header(out) == a_header()
    assert out[:8] == b"KVBLOCK1"
    assert bytes(out[268:]) == bytes(LAYOUT.header_bytes - 268)
    check_header(unpack_header(out), BlockKey(b"k" * 32), SPEC.namespace_id, LAYOUT)


def test_any_changed_bit_of_a_header_is_noticed():
    out = memoryview(bytearray(LAYOUT.header_bytes))
    pack_header(a_header(), out)
    for position in range(268):
        out[position] ^= 0x10
        with pytest.raises(CorruptBlock):
            unpack_header(out)
        out[position] ^= 0x10
    assert unpack_header(out) == a_header()


def test_what_a_header_has_to_agree_with():
    key, namespace = BlockKey(b"k" * 32), SPEC.namespace_id
    for header, field in (
        (a_header(key=BlockKey(b"x" * 32)), "key"),
        (a_header(namespace_id=NamespaceId(b"x" * 32)), "key"),
        (a_header(layers=2, slice_crcs=(1, 2)), "lengths"),
        (a_header(slice_bytes=512), "lengths"),
    ):
        with pytest.raises(CorruptBlock) as caught:
            check_header(header, key, namespace, LAYOUT)
        assert caught.value.field == field
    with pytest.raises(CorruptBlock):
        unpack_header(memoryview(bytes(255)))


def test_slices_are_checked_without_their_padding():
    data = bytearray(3 * 512)
    crcs = slice_crcs(memoryview(data), 3, 300, 512)
    header = a_header(slice_bytes=300, slice_stride=512, slice_crcs=crcs)
    data[310] = 1
    assert first_bad_slice(memoryview(data), header, range(3)) is None
    data[512 + 299] = 1
    assert first_bad_slice(memoryview(data), header, range(3)) == 1
    assert first_bad_slice(memoryview(data)[1024:], header, range(2, 3)) is None
    assert crcs[0] == crcs[1] == crcs[2]


def test_layout_of_a_real_model():
    layout = BlockLayout.of(NamespaceSpec(model="m", dtype="float16", layers=30, kv_heads=3, head_dim=64, codec="int8"))
    assert layout.raw_slice_bytes == 2 * 3 * 64 * 64 * 2
    assert layout.device_bytes == 30 * 49152
    assert layout.header_bytes == 4096
    assert layout.raw_stored_bytes == 4096 + 30 * 49152
    assert layout.of_codec(Codec.RAW)[2] > layout.of_codec(Codec.INT8)[2] == layout.stored_bytes


def test_tier_bits_are_those_of_the_wire():
    assert [tier.bit for tier in Tier] == [1, 2, 4]


def test_clocks():
    clock = ManualClock(5)
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    assert MonotonicClock().now() <= MonotonicClock().now()


@pytest.mark.parametrize("name", ["rope", "extra"])
def test_nested_settings_have_a_bound(name):
    """A parser that recurses is never asked to go deep; brackets within strings do not count."""
    fields = {"model": "m", "dtype": "float16", "layers": 1, "kv_heads": 1, "head_dim": 8, "block_tokens": 8}
    for deep in ("[" * 8000, "[" * 8000 + "]" * 8000, '{"a":' * 3000 + "1" + "}" * 3000):
        with pytest.raises(InvalidArgument) as caught:
            NamespaceSpec(**fields, **{name: deep})
        assert caught.value.field == f"spec.{name}"
    for shallow in ("[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX, '["' + "[" * 8000 + '\\""]'):
        NamespaceSpec(**fields, **{name: shallow})
