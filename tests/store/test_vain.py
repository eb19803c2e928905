"""A full disk does not empty the tier: blocks are dropped for a write only while that helps."""

from __future__ import annotations

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.errors import TierFull
from kvstore.core.types import Tier
from kvstore.store.moves.vain import FIRST_S, LAST_S, Vain
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import World


class OthersFilled(TierFull):
    """What the tier says when the disk is below its floor."""

    def __init__(self, message):
        super().__init__(message, others=True)


def on_ssd(world):
    return sum(tier.blocks for tier in world.store.status().tiers if tier.tier is Tier.SSD)


@pytest.fixture
def world():
    made = World(disk=MemoryDisk(1 << 20), host_blocks=200)
    for seed in range(10):
        made.put(made.chain(seed, 4))
    made.run()
    assert on_ssd(made) == 40
    yield made
    made.disk.fail_writes = None
    made.close()


def test_no_block_is_dropped_while_others_fill_the_disk(world):
    world.disk.fail_writes = OthersFilled
    for seed in range(20, 30):
        world.put(world.chain(seed, 4))
        world.run()
    assert on_ssd(world) == 40


def test_dropping_that_does_not_help_is_not_repeated_until_its_time(world):
    world.disk.fail_writes = TierFull
    world.put(world.chain(20, 1))
    world.run()
    after_first = on_ssd(world)
    assert after_first < 40, "a tier that says full is believed once"
    for seed in range(21, 40):
        world.put(world.chain(seed, 1))
        world.run()
    assert on_ssd(world) == after_first
    world.disk.fail_writes = None
    keys = world.chain(50, 2)
    world.put(keys)
    world.run()
    assert on_ssd(world) > after_first, "and it is written again once it can be"


def test_each_failure_doubles_the_wait_and_a_success_ends_it():
    clock = ManualClock()
    vain = Vain(clock)
    assert vain.may_try()
    waits = []
    for _ in range(12):
        vain.failed()
        assert not vain.may_try()
        before = clock.now()
        while not vain.may_try():
            clock.advance(FIRST_S / 2)
        waits.append(clock.now() - before)
    assert waits[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert waits[-1] == LAST_S
    vain.failed()
    vain.worked()
    assert vain.may_try()
