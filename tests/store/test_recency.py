"""What was used before a restart is evicted after what was not, from HOST as from SSD."""

from __future__ import annotations

import pytest

from kvstore.core.types import Target, Tier
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.moves.recency import PERIOD_SECONDS
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import STORED
from kvstore.tiers.ssd import SsdConfig, SsdTier

FULL = StoreConfig(ssd=Watermarks(1.0, 1.0), host=Watermarks(1.0, 1.0), device=Watermarks(1.0, 1.0))


def coldest_first(world):
    """Keys on SSD's list from the cold end."""
    with world.store._state.locked() as book:
        lru, keys = book.policies[Tier.SSD], []
        slot = lru.coldest
        while slot >= 0:
            keys.append(book.index.key_of(slot))
            slot = lru.hotter_than(slot)
        return keys


def use(world, keys):
    """A fetch that HOST answers, so that the disk sees no read."""
    found = world.fetch(keys, Target.IN_PLACE)
    assert found.job_id == 0
    world.clock.advance(1.0)


def test_a_block_written_first_and_used_last_goes_last(make_world):
    disk = MemoryDisk(6 * STORED)
    world = make_world(disk=disk)
    chains = [world.chain(number, 2) for number in range(3)]
    for keys in chains:
        world.put(keys)
        world.run()
    world.clock.advance(1.0)
    use(world, chains[0])
    assert not disk.reads
    world.close()
    again = make_world(disk=disk, config=FULL)
    assert set(coldest_first(again)[-2:]) == set(chains[0])
    for number in (8, 9):
        again.put(again.chain(number, 1))
        again.run()
    assert [len(again.residency(keys)) for keys in chains] == [2, 0, 2]
    assert violations(again.store) == []


def test_uses_are_told_now_and_then_and_only_new_ones(make_world, disk):
    told = []
    disk.touch = told.append
    world = make_world(disk=disk)
    a, b = world.chain(1, 2), world.chain(2, 2)
    for keys in (a, b):
        world.put(keys)
        world.run()
    world.clock.advance(1.0)
    use(world, b)
    use(world, a)
    world.store.tick()
    assert not told
    world.clock.advance(PERIOD_SECONDS)
    world.store.tick()
    handles = {block.key: handle for handle, block in disk._blocks.items()}
    assert [sorted(told[0][:2]), sorted(told[0][2:])] == [sorted(handles[k] for k in b), sorted(handles[k] for k in a)]
    world.store.tick()
    assert len(told) == 1
    use(world, b)
    world.clock.advance(PERIOD_SECONDS)
    world.store.tick()
    assert set(told[1]) >= {handles[key] for key in b}
    assert told[1][-1] in {handles[key] for key in b}


@pytest.mark.parametrize("blocks", [3, 5])
def test_children_found_before_their_parents_know_their_depth(make_world, disk, blocks):
    world = make_world(disk=disk)
    trunk, other = world.chain(1, blocks), world.chain(2, 1)
    world.put(trunk)
    world.put(other)
    world.run()
    world.clock.advance(1.0)
    for key in reversed(trunk):
        # Without the rest of its chain, as when an engine holds the others.
        world.clock.advance(1.0)
        world.store._state._book.use([world.store._state._book.index.slots(0)[key]])
    world.close()
    again = make_world(disk=disk)
    index = again.store._state._book.index
    assert [index.depth[index.slots(0)[key]] for key in (*trunk, *other)] == [*range(blocks), 0]
    assert len(again.residency(trunk)) == blocks
    assert violations(again.store) == []


def test_the_real_tier_keeps_it(make_world, tmp_path):
    config = SsdConfig(capacity_bytes=64 << 20, segment_bytes=1 << 20)
    world = make_world(disk=SsdTier(str(tmp_path), config))
    chains = [world.chain(number, 3) for number in range(4)]
    for keys in chains:
        world.put(keys)
        world.run()
    world.clock.advance(1.0)
    use(world, chains[1])
    use(world, chains[0])
    world.close()
    again = make_world(disk=SsdTier(str(tmp_path), config))
    order = coldest_first(again)
    assert [set(order[at : at + 3]) for at in range(0, 12, 3)] == [set(chains[n]) for n in (2, 3, 1, 0)]
