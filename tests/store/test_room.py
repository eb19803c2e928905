"""Who goes when room is made: one large block among small ones, and chains that are longer than the SSD tier."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import ROOT_PARENT, BlockKey, Durability, Outcome, Target, Tier
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.moves.space import Space
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import SPEC, STORED

HIT = Outcome.HIT
LARGE = replace(SPEC, opaque_slice_bytes=170 * 1024, kv_heads=1, salt=b"large")
"""A stored block of 516 KiB, as 64 small ones have and one page more."""


def put_large(world, number):
    cache = world.cache
    namespace = cache.open_namespace(LARGE).namespace_id
    key = BlockKey(number.to_bytes(32, "big"))
    found = cache.reserve(namespace, Tier.HOST, keys=[key])
    done = cache.commit(namespace, [CommitEntry(found.reservation_ids[0], key, ROOT_PARENT)])
    return done.outcomes[0]


def host_blocks(world):
    return next(tier.blocks for tier in world.store.status().tiers if tier.tier is Tier.HOST)


@pytest.fixture
def judged(monkeypatch):

    calls = []
    judge = Space.judge
    monkeypatch.setattr(Space, "judge", lambda self, *args: calls.append(args[1]) or judge(self, *args))
    return calls


@pytest.mark.parametrize("blocks", [256, 1024])
@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("with_disk", [False, True])
def test_one_large_block_takes_about_its_own_room_from_small_ones(make_world, judged, blocks, length, with_disk):
    world = make_world(
        host_blocks=blocks, device_blocks=0, buffer_bytes=8 << 20, disk=MemoryDisk() if with_disk else None
    )
    chains = [world.chain(number, length) for number in range(blocks // length)]
    for keys in chains:
        world.put(keys)
    world.run()
    order = list(chains)
    random.Random(1).shuffle(order)
    lease = world.cache.grant_lease("use", 60_000)
    for keys in order:
        world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease)
        world.cache.release(lease, world.namespace_id, keys)
    needed = 65
    for number in range(2):
        before = host_blocks(world)
        judged.clear()
        assert put_large(world, number + 1) is HIT
        gone = before + 1 - host_blocks(world)
        assert gone <= needed + 2 * length
        assert len(judged) <= 20 * needed
    assert violations(world.store) == []


def test_pinned_neighbours_and_blocks_with_children_stay_where_they_are(make_world):
    world = make_world(host_blocks=256, device_blocks=0, buffer_bytes=8 << 20)
    for number in range(32):
        world.put(world.chain(number, 8))
    lease = world.cache.grant_lease("some", 60_000)
    kept = [world.chain(number, 8) for number in (5, 17)]
    for keys in kept:
        world.cache.fetch(world.namespace_id, keys, Target.IN_PLACE, lease_id=lease)
    assert put_large(world, 1) is HIT
    assert all(len(world.residency(keys)) == 8 for keys in kept)
    for number in range(32):
        # No block is left without its parents.
        assert all(world.residency(world.chain(number, 8)[: len(world.residency(world.chain(number, 8)))]))
    assert violations(world.store) == []


def test_a_large_block_next_to_small_ones_goes_alone(make_world):
    world = make_world(host_blocks=129, device_blocks=0, buffer_bytes=8 << 20)
    assert put_large(world, 1) is HIT
    for number in range(64):
        world.put(world.chain(number, 1))
    assert put_large(world, 2) is HIT
    assert host_blocks(world) == 65


@pytest.mark.parametrize(("chains", "length"), [(1, 400), (10, 40), (3, 150), (200, 2)])
@pytest.mark.parametrize("durable", [True, False])
def test_of_chains_longer_than_ssd_the_newest_stay(make_world, chains, length, durable):
    disk = MemoryDisk(capacity_bytes=100 * STORED)
    world = make_world(host_blocks=64, device_blocks=0, disk=disk, buffer_bytes=8 << 20)
    wanted = Durability.DURABLE if durable else None
    written = []
    for number in range(chains):
        keys, above = world.chain(number, length), ROOT_PARENT
        for begin in range(0, length, 16):
            some = keys[begin : begin + 16]
            done = world.put(some, parent=above, durability=wanted)
            assert set(done.outcomes) == {HIT}
            above = some[-1]
            written += some
            world.run()
            world.clock.advance(0.05)
    assert disk.used_bytes <= disk.capacity_bytes
    assert violations(world.store) == []
    on_ssd = set(disk.keys())
    # All of the newest, and what went is the oldest, but for what a run of one write takes with it.
    assert set(written[-32:]) <= on_ssd
    assert len(on_ssd) >= 60
    assert not on_ssd & set(written[: len(written) - 170])
    # The index does not remember what is gone.
    assert len(world.store._state._book.index) <= 64 + 100 + 8
    world.cache.flush()


def test_a_lower_cap_is_kept_after_a_restart(make_world):
    disk = MemoryDisk(capacity_bytes=200 * STORED)
    world = make_world(host_blocks=64, device_blocks=0, disk=disk, buffer_bytes=8 << 20)
    keys = world.chain(1, 180)
    for begin in range(0, 180, 60):
        world.put(keys[begin : begin + 60], parent=keys[begin - 1] if begin else ROOT_PARENT)
        world.run()
    world.close()
    assert len(disk.keys()) == 180
    disk.capacity_bytes = 100 * STORED
    again = make_world(host_blocks=64, device_blocks=0, disk=disk, config=StoreConfig())
    again.run()
    assert disk.used_bytes <= 95 * STORED
    assert len(disk.keys()) >= 80
    assert violations(again.store) == []


def test_a_policy_is_chosen_by_tier_and_must_be_known(make_world):

    with pytest.raises(InvalidArgument, match="lru"):
        make_world(config=StoreConfig(host=Watermarks(eviction="no such policy")))
