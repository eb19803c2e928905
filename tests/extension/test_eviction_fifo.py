"""First in, first out as an eviction policy: this file, and no edit elsewhere."""

from __future__ import annotations

from kvstore.core.types import Target, Tier
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.eviction.contract import register
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import World

FULL = Watermarks(high=1.0, low=1.0, eviction="fifo")


class Fifo:
    """Copies go in the order in which they came; uses change nothing. Parents go when their children have."""

    def __init__(self, index, tier):
        self.order, self.pinned = {}, set()

    def inserted(self, slot):
        self.order[slot] = None

    def used(self, slots):
        """Makes no difference."""

    def held(self, slot):
        self.pinned.add(slot)

    def released(self, slot):
        self.pinned.discard(slot)

    def removed(self, slot):
        self.order.pop(slot, None)
        self.pinned.discard(slot)

    def reconsider(self, slot):
        """Nothing was set aside."""

    def reconsider_all(self):
        """Nothing was set aside."""

    def victims(self, choice):
        left = [slot for slot in self.order if slot not in self.pinned]
        taken = True
        while taken and not choice.done:
            taken = [slot for slot in left if not choice.done and choice.take(slot)]
            left = [slot for slot in left if slot not in taken]
        choice.take_anyway(left)


register("fifo", Fifo)


def test_first_in_first_out_whatever_is_used():
    config = StoreConfig(device=FULL, host=FULL, ssd=FULL)
    world = World(host_blocks=8, device_blocks=0, disk=MemoryDisk(), config=config)
    keys = [world.chain(number, 1)[0] for number in range(12)]
    for key in keys[:8]:
        world.put([key])
    world.run()
    lease = world.cache.grant_lease("use", 60_000)
    world.cache.fetch(world.namespace_id, keys[:4], Target.HOST, lease_id=lease)
    world.cache.release(lease)
    pinned = world.cache.grant_lease("pin", 60_000)
    world.cache.fetch(world.namespace_id, keys[1:2], Target.HOST, lease_id=pinned)
    for key in keys[8:]:
        world.put([key])
    in_host = [key for key in keys if any(r & Tier.HOST.bit for r in world.residency([key]))]
    assert in_host == [keys[1], *keys[5:]]
    chain = world.chain(99, 8)
    world.put(chain[:6])
    assert len(world.residency(chain)) == 6
    assert violations(world.store) == []
    world.close()
