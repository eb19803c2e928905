"""The registry of codecs: what is known, and that nothing unknown has a size."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InternalError, TierError
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec, Tier
from kvstore.kernels import codecs
from kvstore.kernels.codecs import CodecRow
from kvstore.store.tables.namespaces import Namespace
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import World
from kvstore.tiers.coding import encode_block

SPEC = NamespaceSpec(model="m", dtype="float16", layers=2, kv_heads=1, head_dim=8, block_tokens=8, codec="int8")


def test_numbers_and_words_are_those_of_the_wire():
    assert (Codec.of_word("raw"), Codec.of_word("int8")) == (Codec.RAW, Codec.INT8)
    assert (int(Codec.RAW), int(Codec.INT8)) == (0, 1)
    assert codecs.words()[:2] == ("raw", "int8")


def test_what_is_taken_or_out_of_range_is_refused():
    for number, word in ((0, "new"), (1, "new"), (7, "int8"), (8, "new"), (-1, "new"), (7, "")):
        with pytest.raises(ValueError, match="taken"):
            codecs.register(CodecRow(number, word, lambda geometry: 1))


def test_an_unknown_codec_has_no_size():
    with pytest.raises(ValueError, match="codec is 7"):
        Codec.CODEC_7.word  # noqa: B018
    with pytest.raises(ValueError, match="codec is 'fp4'"):
        SPEC.geometry.slice_bytes("fp4")
    layout = BlockLayout.of(SPEC)
    namespace = Namespace(0, SPEC.namespace_id, SPEC, layout, NamespacePolicy())
    assert [namespace.kind_of(a, b) for b in (Codec.RAW, Codec.INT8) for a in (Codec.RAW, Codec.INT8)] == [0, 1, 2, 3]
    for pair in ((Codec.CODEC_6, Codec.RAW), (Codec.RAW, Codec.CODEC_6)):
        with pytest.raises(InternalError, match=r"codecs (6 and 0|0 and 6)"):
            namespace.kind_of(*pair)
    with pytest.raises(TierError, match="raw"):
        encode_block(memoryview(b""), memoryview(bytearray()), layout, SPEC.geometry, Codec.RAW)


def test_a_block_of_a_codec_that_its_namespace_has_not_is_dropped_at_start():
    disk = MemoryDisk()
    world = World(disk=disk)
    key, other = world.chain(1, 1)[0], world.chain(2, 1)[0]
    world.put([key])
    world.put([other])
    world.run()
    world.close()
    for block in disk._blocks.values():
        block.codec = Codec.INT8 if block.key == key else block.codec
    again = World(disk=disk)
    assert again.residency([key]) == ()
    assert again.residency([other]) == (Tier.SSD.bit,)
    assert violations(again.store) == []
    again.close()
