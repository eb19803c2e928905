"""What tests of reading plans share: a store over an SSD folder, bytes that follow from keys, what must be left."""

from __future__ import annotations

import os

import pytest

from kvstore.core.types import Durability, Outcome
from kvstore.kernels import native
from kvstore.testing.invariants import violations
from kvstore.testing.world import SPEC, World, slice_of
from kvstore.tiers.ssd.config import SsdConfig
from kvstore.tiers.ssd.tier import SsdTier

LAYERS = SPEC.layers

needs_native = pytest.mark.skipif(not native.available(), reason="plans are read by native code")


@pytest.fixture(name="world")
def world_over_ssd(tmp_path):
    made = World(host_blocks=64, device_blocks=0, disk=ssd(tmp_path / "ssd"), buffer_bytes=1 << 20)
    yield made
    assert violations(made.store) == []
    made.close()


def ssd(folder, **more):
    return SsdTier(str(folder), SsdConfig(capacity_bytes=64 << 20, compact_interval_s=None, **more))


def stored(world, seed, blocks):
    keys = world.chain(seed, blocks)
    assert set(world.put(keys, durability=Durability.DURABLE).outcomes) == {Outcome.HIT}
    world.run()
    return keys


def read(pieces, keys, indices=None):
    """Every piece compared with what its blocks must hold; pairs of layer and position in the order of coming."""
    came = []
    for piece in pieces:
        for i in range(piece.count):
            position = piece.first + i
            key = keys[position if indices is None else indices[position]]
            assert piece.data[i].tobytes() == slice_of(key, piece.layer)
            came.append((piece.layer, position))
    return came


def everything(count, layers=range(LAYERS)):
    return [(layer, position) for layer in layers for position in range(count)]


def idle(world):
    """Nothing of a plan is left: no pins, no leases, the whole buffer free, no file once the last read has ended."""
    reading = world.store._verbs.plans._reading
    while reading._by_native:
        os.sched_yield()
    assert world.store._state._book.pins == {}
    assert not world.store._state.owners.plans
    assert not world.store._state.owners.leases
    owner = world.cache._owner
    assert owner.buffer.used_bytes == 0
    assert owner.buffer_io == 0
