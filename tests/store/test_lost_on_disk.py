"""Blocks that the SSD tier drops by itself: their numbers may name other blocks by then, which must not go for them."""

from __future__ import annotations

import errno

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import TierUnavailable, Unavailable
from kvstore.core.types import Area, Durability, Outcome, Reason, Target, Tier
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.testing.invariants import violations
from kvstore.tiers.ssd import SsdConfig, SsdTier

HIT, MISS = Outcome.HIT, Outcome.MISS
CONFIG = SsdConfig(capacity_bytes=64 << 20, segment_bytes=1 << 20, commit_interval_s=None, compact_interval_s=None)


class Case:
    """A store over a real tier over a disk in memory."""

    def __init__(self, make_world) -> None:
        self._make_world = make_world
        self.port = FaultyDisk()
        self.tier = SsdTier("", CONFIG, port=self.port)
        self.world = make_world(disk=self.tier)

    def put(self, keys, durability=Durability.DURABLE):
        return self.world.put(keys, durability=durability).outcomes

    def lose(self, keys):
        """Write blocks whose sync fails: the tier drops them, and comes back when it is probed."""
        self.put(keys, Durability.MEMORY)
        self.world.run()
        self.port.fail = lambda _number, kind, name: errno.EIO * (kind == "fdatasync" and "segment" in name)
        with pytest.raises(Unavailable, match="not all is durable: what was written could not be synced"):
            self.world.cache.flush(1000)
        self.port.fail = lambda *_: 0
        assert self.tier.probe()

    def evict(self, tier, keys):
        return self.world.store.evict(tier, namespace_id=self.world.namespace_id, keys=keys).outcomes

    def after_power_cut(self, keys):
        """Which blocks a restart finds."""
        world = self._make_world(disk=SsdTier("", CONFIG, port=self.port.crash(Crash.LOST)))
        return world.fetch(keys).outcomes


@pytest.fixture
def case(make_world):
    return Case(make_world)


def test_a_block_that_fails_its_check_does_not_take_the_next_one_with_it(case):
    (bad,), (next_one,) = case.world.chain(1, 1), case.world.chain(2, 1)
    case.put([bad])
    case.evict(Tier.HOST, [bad])
    name = next(name for name in case.port.image() if name.startswith("segment"))
    case.port.overwrite(name, case.port.image()[name].replace(bytes(b ^ 1 for b in bad), bytes(len(bad))))
    read = case.tier.read

    def read_and_be_late(reads):
        status = read(reads)
        # Between the tier's verdict and the store's hearing of it, another block takes the place.
        assert case.put([next_one]) == (HIT,)
        return status

    case.tier.read = read_and_be_late
    assert case.world.fetch([bad]).outcomes == (MISS,)
    case.tier.read = read
    case.evict(Tier.HOST, [next_one])
    assert case.world.fetch([next_one]).outcomes == (HIT,)
    assert case.after_power_cut([next_one]) == (HIT,)


def test_a_block_whose_sync_failed_does_not_take_the_next_one_with_it(case):
    lost, next_one = case.world.chain(1, 2), case.world.chain(2, 2)
    case.lose(lost)
    assert case.put(next_one) == (HIT,) * 2
    case.world.cache.remove(case.world.namespace_id, lost)
    case.tier.flush()
    assert case.after_power_cut(next_one) == (HIT,) * 2
    assert violations(case.world.store) == []


def test_a_block_whose_sync_failed_is_written_again_when_it_is_put_durably(case):
    keys = case.world.chain(1, 2)
    case.lose(keys)
    assert case.put(keys) == (HIT,) * 2
    assert case.after_power_cut(keys) == (HIT,) * 2


def test_a_parent_whose_sync_failed_is_written_with_its_child(case):
    keys = case.world.chain(1, 3)
    case.lose(keys[:2])
    world = case.world
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=keys[2:])
    world.write(world.cache.memory(Area.BUFFER), reserved.places[0], keys[2])
    entries = [CommitEntry(reserved.reservation_ids[0], keys[2], keys[1])]
    assert world.cache.commit(world.namespace_id, entries, durability=Durability.DURABLE).outcomes == (HIT,)
    assert case.after_power_cut(keys) == (HIT,) * 3


def test_what_is_lost_is_no_longer_said_to_be_on_ssd(case):
    keys = case.world.chain(1, 2)
    case.lose(keys)
    case.world.store.tick()
    assert case.world.residency(keys) == (Tier.HOST.bit,) * 2
    case.world.cache.flush(1000)
    assert case.after_power_cut(keys) == (HIT,) * 2


def test_a_loss_that_is_told_before_its_copy_is_published_is_remembered(case):
    keys = case.world.chain(1, 2)
    case.put(keys, Durability.MEMORY)
    write = case.tier.write

    def write_and_lose(*args, **options):
        handles = write(*args, **options)
        case.port.fail = lambda _number, kind, name: errno.EIO * (kind == "fdatasync" and "segment" in name)
        with pytest.raises(TierUnavailable):
            case.tier.flush()
        case.port.fail = lambda *_: 0
        assert case.tier.probe()
        case.world.store.tick()
        return handles

    case.tier.write = write_and_lose
    case.world.run()
    case.tier.write = write
    assert case.put(keys) == (HIT,) * 2
    assert case.after_power_cut(keys) == (HIT,) * 2


def test_a_file_that_was_removed_from_outside_is_noticed_before_the_next_durable_answer(case):
    keys = case.world.chain(1, 2)
    case.put(keys)
    for name in [name for name in case.port.image() if name.startswith("segment")]:
        case.port.remove(name)
    case.tier.housekeeping()
    assert case.put(keys) == (HIT,) * 2
    assert case.after_power_cut(keys) == (HIT,) * 2


@pytest.mark.parametrize("target", [Target.IN_PLACE, Target.BUFFER])
def test_a_tier_that_comes_back_while_it_refuses_a_read_keeps_the_block(make_world, disk, target):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys, durability=Durability.DURABLE)
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    read = disk.read

    def read_and_recover(reads):
        status = read(reads)
        disk.degraded = False
        return status

    disk.read = read_and_recover
    disk.degraded = True
    assert world.fetch(keys, target).reasons == (Reason.TIER_UNAVAILABLE,) * 2
    disk.degraded = True
    world.store.verify()
    world.store.tick()
    assert disk.keys() == keys
    assert world.fetch(keys, target).outcomes == (HIT,) * 2
