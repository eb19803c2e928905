"""What a tenant was guaranteed stays, whatever others store: HOST and SSD, a restart included."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.core.types import Tier
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.guarantees import Guarantee
from kvstore.store.moves import victims
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import SPEC, STORED

FULL = Watermarks(high=1.0, low=1.0)


def config(host=0, ssd=0):
    promised = [Guarantee("a", tier, n * STORED) for tier, n in ((Tier.HOST, host), (Tier.SSD, ssd)) if n]
    return StoreConfig(device=FULL, host=FULL, ssd=FULL, guarantees=tuple(promised))


def tenant(world, salt):
    world.namespace_id = world.cache.open_namespace(replace(SPEC, salt=salt)).namespace_id
    return world.namespace_id


def blocks_of(world, namespace_id, tier):
    found = (each for each in world.store.namespaces() if each.namespace_id == namespace_id)
    return next(found).blocks_by_tier[tier - 1]


def put_for(world, namespace_id, seed, length=1):
    world.namespace_id = namespace_id
    world.put(world.chain(seed, length))
    world.run()


@pytest.mark.parametrize("length", [1, 4])
def test_a_flood_of_another_tenant_leaves_the_guaranteed_blocks_in_host(make_world, length):
    world = make_world(host_blocks=16, device_blocks=0, config=config(host=8))
    a, b = tenant(world, b"a"), tenant(world, b"b")
    for seed in range(12 // length):
        put_for(world, a, seed, length)
    for seed in range(60):
        put_for(world, b, seed, length)
    assert blocks_of(world, a, Tier.HOST) == 8
    assert blocks_of(world, b, Tier.HOST) > 0


@pytest.mark.parametrize("length", [1, 4])
def test_a_flood_leaves_the_guaranteed_blocks_on_ssd_and_after_a_restart(make_world, length):
    disk = MemoryDisk(16 * STORED)
    world = make_world(host_blocks=8, device_blocks=0, disk=disk, config=config(ssd=8))
    a, b = tenant(world, b"a"), tenant(world, b"b")
    for seed in range(8 // length):
        put_for(world, a, seed, length)
    for seed in range(40):
        put_for(world, b, seed, length)
    assert blocks_of(world, a, Tier.SSD) == 8
    world.close()
    again = make_world(host_blocks=8, device_blocks=0, disk=disk, config=config(ssd=8))
    tenant(again, b"a")
    tenant(again, b"b")
    for seed in range(100, 140):
        put_for(again, b, seed, length)
    assert blocks_of(again, a, Tier.SSD) == 8
    assert blocks_of(again, b, Tier.SSD) > 0


def test_a_tenant_above_its_guarantee_loses_its_oldest(make_world):
    world = make_world(host_blocks=8, device_blocks=0, config=config(host=4))
    a, b = tenant(world, b"a"), tenant(world, b"b")
    for seed in range(8):
        put_for(world, a, seed)
        if seed >= 3:
            for other in range(20):
                put_for(world, b, seed * 100 + other)
    world.namespace_id = a
    assert [seed for seed in range(8) if world.residency(world.chain(seed, 1))] == [4, 5, 6, 7]


@pytest.mark.parametrize("seed", range(4))
def test_what_a_tenant_has_never_falls_below_its_guarantee(make_world, seed):
    rng = random.Random(seed)
    world = make_world(host_blocks=16, device_blocks=0, disk=MemoryDisk(24 * STORED), config=config(host=6, ssd=9))
    a, b = tenant(world, b"a"), tenant(world, b"b")
    had = {Tier.HOST: 0, Tier.SSD: 0}
    for _ in range(300):
        put_for(world, rng.choice((a, b, b, b)), rng.randrange(60), rng.randrange(1, 5))
        for tier, least in ((Tier.HOST, 6), (Tier.SSD, 9)):
            now = blocks_of(world, a, tier)
            assert now >= min(had[tier], least)
            had[tier] = now
    assert had[Tier.HOST] >= 6
    assert had[Tier.SSD] >= 9
    assert not violations(world.store)


def test_one_choice_passes_by_a_bounded_number_of_guaranteed_copies(make_world, monkeypatch):
    monkeypatch.setattr(victims, "GUARDED_MAX", 4)
    world = make_world(host_blocks=64, device_blocks=0, config=config(host=50))
    a, b = tenant(world, b"a"), tenant(world, b"b")
    for seed in range(50):
        put_for(world, a, seed)
    for seed in range(14):
        put_for(world, b, 1000 + seed)
    passed = []
    plain = victims.Victims.take

    def counted(self, slot):
        taken = plain(self, slot)
        passed.append(self._passed)
        return taken

    monkeypatch.setattr(victims.Victims, "take", counted)
    for seed in range(30):
        put_for(world, b, 2000 + seed)
    assert max(passed) == 4
    assert blocks_of(world, a, Tier.HOST) == 50
    assert blocks_of(world, b, Tier.HOST) == 14
    assert violations(world.store) == []
