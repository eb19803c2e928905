"""fp8 (e4m3, a scale a slice) as a codec, in numpy: this file, and no edit elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec, Outcome, Target, Tier
from kvstore.kernels.codecs import CodecRow, register
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import World
from kvstore.tiers.coding import decode_block

EXPONENT, FRACTION = np.arange(127) >> 3, np.arange(127) & 7
VALUES = np.where(EXPONENT, (8 + FRACTION) * 2.0 ** (EXPONENT - 10), FRACTION * 2.0**-9).astype(np.float32)
EDGES = (VALUES[1:] + VALUES[:-1]) / 2


def encode(source, to, geometry, slices, *, strides):
    for i in range(slices):
        raw = np.frombuffer(source, np.float16, geometry.raw_bytes // 2, i * strides[0]).astype(np.float32)
        if not np.isfinite(raw).all():
            return False
        scale = np.float32(max(np.abs(raw).max(), 1e-6) / 448)
        codes = np.searchsorted(EDGES, np.abs(raw) / scale).astype(np.uint8) | (np.signbit(raw).astype(np.uint8) << 7)
        to[i * strides[1] : i * strides[1] + codes.size + 4] = codes.tobytes() + scale.tobytes()
    return True


def decode(source, to, geometry, slices, *, strides):
    for i in range(slices):
        codes = np.frombuffer(source, np.uint8, geometry.raw_bytes // 2, i * strides[1])
        scale = np.frombuffer(source, np.float32, 1, i * strides[1] + codes.size)[0]
        raw = VALUES[codes & 127] * scale * np.where(codes & 128, -1, 1)
        to[i * strides[0] : i * strides[0] + geometry.raw_bytes] = raw.astype(np.float16).tobytes()


register(CodecRow(2, "fp8", lambda geometry: geometry.raw_bytes // 2 + 4, encode, decode))
SPEC = NamespaceSpec(model="fp8", dtype="float16", layers=3, kv_heads=2, head_dim=16, block_tokens=16, codec="fp8")


class Small(World):
    def raw(self, key):
        values = np.random.default_rng(key[0]).standard_normal((3, self.layout.raw_slice_stride // 2))
        return values.astype(np.float16)

    def write(self, memory, place, key):
        memory[place.offset : place.offset + self.raw(key).nbytes] = self.raw(key).tobytes()

    def read(self, cache, place, key, layers=None):
        bytes_there = bytearray(cache.memory(place.area)[place.offset :][: self.layout.units_bytes(place.codec)])
        back = bytearray(self.layout.units_bytes(Codec.RAW)) if place.codec.word == "fp8" else bytes_there
        if back is not bytes_there:
            decode_block(memoryview(bytes_there), memoryview(back), self.layout, SPEC.geometry, place.codec)
        return np.abs(np.frombuffer(back, np.float16).reshape(3, -1) - self.raw(key)).max() < 0.2


def test_fp8_in_every_tier_and_after_a_restart():
    world = Small(disk=MemoryDisk(), spec=SPEC)
    keys = world.chain(1, 3)
    world.put(keys[:2])
    world.put(keys[2:], parent=keys[1], tier=Tier.DEVICE)
    world.run()
    for target in (Target.IN_PLACE, Target.DEVICE, Target.HOST):
        assert set(world.fetch(keys, target).outcomes) == {Outcome.HIT}
    assert {world.store.show_block(key, namespace_id=world.namespace_id).codec.word for key in keys} == {"fp8"}
    with pytest.raises(InvalidArgument, match="device_codec"):
        world.cache.open_namespace(SPEC, policy=NamespacePolicy(device_codec="fp8"))
    assert violations(world.store) == []
    world.close()
    again = Small(disk=world.disk, spec=SPEC)
    assert set(again.fetch(keys, Target.HOST).outcomes) == {Outcome.HIT}
    assert violations(again.store) == []
    again.close()
