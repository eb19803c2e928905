"""A namespace whose blocks are coded on SSD: right bytes, fewer of them, told by a counter."""

from __future__ import annotations

from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Durability, Outcome, Target, Tier
from kvstore.testing.world import SPEC
from kvstore.tiers.ssd import SsdConfig, SsdTier

CONFIG = SsdConfig(capacity_bytes=64 << 20, segment_bytes=1 << 20)
SAVED = "disk_coded_saved_bytes"


def test_blocks_coded_on_ssd_come_back_right_and_take_less(make_world, tmp_path):
    world = make_world(disk=SsdTier(str(tmp_path), CONFIG), threads=1)
    plain, coded = world.chain(1, 8), world.chain(2, 8)
    assert world.put(plain, durability=Durability.DURABLE).outcomes == (Outcome.HIT,) * 8
    assert world.store.status().counters[SAVED] == 0
    world.cache.open_namespace(SPEC, policy=NamespacePolicy(lossless="lz4"))
    assert world.put(coded, durability=Durability.DURABLE).outcomes == (Outcome.HIT,) * 8
    saved = world.store.status().counters[SAVED]
    assert saved > 0
    world.close()
    again = make_world(disk=SsdTier(str(tmp_path), CONFIG))
    assert again.store.status().counters[SAVED] == saved
    for keys in (plain, coded):
        assert again.residency(keys) == (Tier.SSD.bit,) * 8
        assert again.fetch(keys, Target.DEVICE).outcomes == (Outcome.HIT,) * 8
