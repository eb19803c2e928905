"""What an answer to a durable put promises of blocks that were resident before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.errors import TierFull, TierUnavailable, Unavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Durability, Outcome, Tier
from kvstore.testing.world import SPEC

SSD, HIT = Tier.SSD.bit, Outcome.HIT


@pytest.mark.parametrize("written", [False, True], ids=["in memory", "on SSD, not synced"])
def test_a_resident_block_that_is_not_durable_is_made_so_when_it_is_put_durably(make_world, disk, written):
    world = make_world(disk=disk)
    keys = world.chain(1, 3)
    world.put(keys)
    if written:
        world.run()
    assert disk.crashed().keys() == []
    done = world.put(keys, durability=Durability.DURABLE)
    assert (done.outcomes, done.existed) == ((HIT,) * 3, (True,) * 3)
    assert make_world(disk=disk.crashed()).residency(keys) == (SSD,) * 3


def test_a_block_that_is_durable_is_not_asked_for_again(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    reserve = world.cache.reserve
    world.put(keys, durability=Durability.DURABLE)
    again = reserve(world.namespace_id, Tier.HOST, keys=keys, durability=Durability.DURABLE)
    assert again.outcomes == (HIT,) * 2
    world.cache.remove(world.namespace_id, keys[:1])
    # Without its parent a restart could not reach it.
    assert reserve(world.namespace_id, Tier.HOST, keys=keys[1:], durability=Durability.DURABLE).outcomes != (HIT,)


def test_a_policy_asks_for_durability_where_the_caller_does_not(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    assert world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys).outcomes == (HIT,) * 2
    world.cache.open_namespace(SPEC, policy=NamespacePolicy(durability=Durability.DURABLE))
    assert world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys).outcomes == (Outcome.PENDING,) * 2
    memory = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys, durability=Durability.MEMORY)
    assert memory.outcomes == (HIT,) * 2


def test_a_flush_that_leaves_something_behind_says_so(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    for failure in (TierFull, TierUnavailable):
        disk.fail_writes = failure
        with pytest.raises(Unavailable, match="not all is durable"):
            world.cache.flush()
    disk.fail_writes = TierFull
    assert world.store.drain().unflushed_blocks == 2
    disk.fail_writes = None
    assert world.cache.flush() == 2
    assert make_world(disk=disk.crashed()).residency(keys) == (SSD,) * 2


def test_a_flush_that_runs_out_of_time_says_so(make_world, disk):
    world = make_world(disk=disk)
    world.put(world.chain(1, 2))
    disk.before_write = lambda: world.clock.advance(2.0)
    world.put(world.chain(2, 1))
    world.store._state.config = replace(world.store._state.config, extent_blocks_max=1)
    with pytest.raises(Unavailable, match="2 blocks are not on SSD, of 3"):
        world.cache.flush(1000)
    assert world.cache.flush(60_000) == 2
