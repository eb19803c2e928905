"""Reading plans while files are damaged, removed, rewritten and used again: right bytes or a named end."""

from __future__ import annotations

import os

import pytest

from kvstore.client.plan import Plan, PlanEnded
from kvstore.core.types import Durability, Outcome, Reason, Tier
from kvstore.testing.invariants import violations
from kvstore.testing.world import World, slice_of
from kvstore.tiers.ssd.config import SsdConfig
from kvstore.tiers.ssd.tier import SsdTier
from tests.store.planning import everything, idle, needs_native, read, ssd, stored, world_over_ssd  # noqa: F401  pytest finds the fixture

pytestmark = needs_native


def segments(folder):
    return sorted(folder.glob("segment-*"))


def flip(folder, needle, mask=1):
    """Turn a bit over wherever these bytes lie on disk."""
    for path in segments(folder):
        data = bytearray(path.read_bytes())
        at = data.find(needle)
        if at >= 0:
            data[at + 5] ^= mask
            # In place: the tier's descriptors stay on this file.
            fd = os.open(path, os.O_WRONLY)
            os.pwrite(fd, data, 0)
            os.fsync(fd)
            os.close(fd)
            return
    raise ValueError("these bytes lie nowhere")


def test_a_flipped_bit_ends_the_plan_with_its_block_named_and_set_aside(world, tmp_path):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        read(plan.pieces(), keys)
        flip(tmp_path / "ssd", slice_of(keys[23], 1))
        plan.restart()
        came = []
        with pytest.raises(PlanEnded) as ended:
            came.extend(one for piece in plan.pieces() for one in read([piece], keys))
        assert (ended.value.why, ended.value.key) == (Reason.QUARANTINED, keys[23])
        assert (1, 23) not in came
        assert came == everything(40)[: len(came)]
        plan.restart()
        with pytest.raises(PlanEnded):
            next(plan.pieces())
    assert not world.store._state._book.has(world.store._state._book.find((world.namespace_id, keys[23])), Tier.SSD)
    assert any(entry.key == keys[23] for entry in world.disk.quarantine())
    idle(world)


def test_a_removed_file_is_never_a_wrong_byte(world, tmp_path):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        for path in segments(tmp_path / "ssd"):
            path.unlink()
        assert read(plan.pieces(), keys) == everything(40)
        world.disk.housekeeping()
        world.run()
        plan.restart()
        # The file is there as long as someone reads from it.
        assert read(plan.pieces(), keys) == everything(40)
    # Open anew there is nothing to read.
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        assert not plan.keys_mask.any()


def test_a_plan_follows_blocks_that_are_rewritten_and_files_that_are_used_again(tmp_path):
    # Segments of 256 KiB, so that what is rewritten leaves whole files behind, which the next writes fill.
    disk = SsdTier(
        str(tmp_path / "ssd"), SsdConfig(capacity_bytes=4 << 20, segment_bytes=1 << 18, compact_interval_s=None)
    )
    world = World(host_blocks=256, device_blocks=0, disk=disk)
    keys = stored(world, 1, 20)
    others = [stored(world, 2 + n, 20) for n in range(4)]
    engine = None
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        assert read(plan.pieces(), keys) == everything(20)
        engine = world.store._verbs.plans._reading.engine
        for turn in range(4):
            for some in others:
                world.cache.remove(world.namespace_id, some[1:])
            world.run()
            disk.compact(0.01)
            others = [stored(world, 100 + 10 * turn + n, 20) for n in range(4)]
            plan.restart()
            assert read(plan.pieces(), keys) == everything(20)
    assert engine.stats().stale > 0
    assert violations(world.store) == []
    world.close()


def test_pinned_blocks_are_not_evicted_and_writes_go_on_beside_them(tmp_path):
    disk = SsdTier(str(tmp_path / "ssd"), SsdConfig(capacity_bytes=1 << 20, compact_interval_s=None))
    world = World(host_blocks=16, device_blocks=0, disk=disk)
    keys = stored(world, 1, 10)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        for number in range(60):
            world.put(world.chain(50 + number, 16), durability=Durability.DURABLE)
            world.run()
        assert world.store.status().counters.get("ssd_evicted", 0) > 0
        assert read(plan.pieces(), keys) == everything(10)
        assert set(world.cache.remove(world.namespace_id, keys)) == {Outcome.BUSY}
    assert set(world.cache.remove(world.namespace_id, keys)) == {Outcome.HIT}
    assert violations(world.store) == []
    world.close()
