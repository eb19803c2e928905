"""Reading plans over a store in process: right bytes, whatever is asked and wherever it lies."""

from __future__ import annotations

import random
import sys
import threading
from itertools import islice

import pytest

from kvstore.client.plan import Plan, PlanEnded
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Outcome, Reason, Tier
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import SPEC, World
from tests.store.planning import LAYERS, everything, idle, needs_native, read, ssd, stored, world_over_ssd  # noqa: F401  pytest finds the fixture

pytestmark = needs_native


def test_a_plan_reads_every_slice_in_order_and_again_without_resolving(world):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=3) as plan:
        assert plan.keys_mask.all()
        assert read(plan.pieces(), keys) == everything(40)
        plan.restart()
        assert read(plan.pieces(), keys) == everything(40)
        assert list(plan.pieces()) == []
    idle(world)


def test_passes_queued_ahead_and_dropped_ones(world):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        plan.restart(ahead=True)
        plan.queue(2, [7, 3])
        assert read(plan.pieces(), keys) == everything(40)
        assert len(read(islice(plan.pieces(), 4), keys)) > 0
        # The rest of the second pass and the queued one go.
        plan.restart()
        assert read(plan.pieces(), keys) == everything(40)
        assert list(plan.pieces()) == []


def test_one_layer_of_all_blocks(world):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2, start=False) as plan:
        plan.queue(1)
        plan.queue(0)
        assert read(plan.pieces(), keys) == everything(40, [1])
        assert read(plan.pieces(), keys) == everything(40, [0])


def test_nothing_a_block_is_done_in_python_while_a_plan_advances(world):
    """Calls of the store's threads and of the reader, counted while passes of few and of many blocks are read."""
    keys = stored(world, 1, 60)
    calls = []
    count = lambda _frame, event, _what: calls.append(event) if event == "call" else None  # noqa: E731
    # The store's own thread for plans begins with the first plan, and is counted from its beginning.
    threading.setprofile(count)
    try:
        taken = {}
        for blocks in (6, 60):
            # As many pieces, so that only their blocks differ.
            piece_bytes = 4096 if blocks == 6 else 40960
            with Plan.open(
                world.cache, world.namespace_id, keys[:blocks], piece_bytes=piece_bytes, pieces=2, start=False
            ) as plan:
                plan.restart()
                before = len(calls)
                sys.setprofile(count)
                pieces = sum(1 for _ in plan.pieces())
                sys.setprofile(None)
                taken[blocks] = pieces, len(calls) - before
        assert taken[6][0] == taken[60][0]
        assert taken[60][1] <= taken[6][1] + 12
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_selected_blocks_come_in_their_order_as_often_as_named(world):
    keys = stored(world, 1, 40)
    chosen = [39, 0, 7, 7, 8, 9, 2]
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2, start=False) as plan:
        assert read(plan.select(1, chosen), keys, chosen) == [(1, i) for i in range(len(chosen))]
        assert list(plan.select(0, [])) == []
        with pytest.raises(InvalidArgument, match=r"blocks\[1\]"):
            plan.select(0, [1, 40])


def test_layers_misses_and_keys_that_come_later(world):
    keys, absent = stored(world, 1, 20), world.chain(9, 2)
    other = stored(world, 2, 5)
    mixed = [*keys[:8], *absent, *keys[8:]]
    with Plan.open(world.cache, world.namespace_id, mixed, layers=(1, 3), piece_bytes=4096, pieces=2) as plan:
        assert [i for i, hit in enumerate(plan.keys_mask) if not hit] == [8, 9]
        assert plan.outcomes[8] is Outcome.MISS
        assert plan.reasons[8] is Reason.NEVER_STORED
        want = [(layer, i) for layer in (1, 2) for i in range(22) if i not in (8, 9)]
        assert read(plan.pieces(), mixed) == want
        plan.extend(other)
        plan.restart()
        assert read(plan.pieces(), [*mixed, *other]) == [
            (layer, i) for layer in (1, 2) for i in range(27) if i not in (8, 9)
        ]
        with pytest.raises(InvalidArgument):
            plan.select(0, [1])
        with pytest.raises(InvalidArgument):
            plan.select(1, [8])


def test_blocks_in_memory_only_are_told_as_such(tmp_path):
    world = World(host_blocks=64, device_blocks=0, disk=ssd(tmp_path / "ssd"))
    keys = world.chain(1, 3)
    world.put(keys)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        assert set(plan.outcomes) == {Outcome.MISS}
        assert set(plan.reasons) == {Reason.NONE}
        assert set(plan.residency) == {Tier.HOST.bit}
        assert list(plan.pieces()) == []
    world.close()


def test_the_reader_keeps_pieces_and_gives_them_back_in_any_order(world):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=4) as plan:
        pieces, held, came = plan.pieces(keep=True), [], []
        draw = random.Random(3)
        for piece in pieces:
            held.append(piece)
            if len(held) == 4:
                draw.shuffle(held)
                while held:
                    one = held.pop()
                    came += read([one], keys)
                    one.done()
        for one in held:
            came += read([one], keys)
            one.done()
        assert sorted(came) == everything(40)


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_over_random_placements_agree_with_the_keys(tmp_path, seed):
    """Chains written at random times, read by plans of random keys, layers and sizes, also after a restart."""
    draw = random.Random(seed)
    disk = ssd(tmp_path / "ssd")
    world = World(host_blocks=64, device_blocks=0, disk=disk, buffer_bytes=1 << 20)
    keys = [key for number in range(4) for key in stored(world, number, draw.randint(1, 24))]
    for turn in range(2):
        for _ in range(4):
            asked = [draw.choice(keys) for _ in range(draw.randint(1, 50))]
            begin = draw.randrange(LAYERS)
            layers = (begin, draw.randint(begin + 1, LAYERS))
            piece = draw.choice([4096, 8192, 65536])
            with Plan.open(
                world.cache, world.namespace_id, asked, layers=layers, piece_bytes=piece, pieces=draw.randint(1, 5)
            ) as plan:
                assert plan.keys_mask.all()
                for _ in range(2):
                    assert read(plan.pieces(), asked) == everything(len(asked), range(*layers))
                    layer, chosen = draw.randrange(*layers), [draw.randrange(len(asked)) for _ in range(5)]
                    assert read(plan.select(layer, chosen), asked, chosen) == [(layer, i) for i in range(5)]
                    plan.restart()
        idle(world)
        world.close()
        if turn == 0:
            world = World(host_blocks=64, device_blocks=0, disk=ssd(tmp_path / "ssd"), buffer_bytes=1 << 20)


def test_coded_slices_are_decoded_natively(tmp_path):
    world = World(host_blocks=64, device_blocks=0, disk=ssd(tmp_path / "ssd"))
    world.cache.open_namespace(SPEC, policy=NamespacePolicy(lossless="lz4"))
    keys = stored(world, 1, 40)
    assert world.disk.state.counters["coded_saved_bytes"] > 0
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=8192, pieces=3) as plan:
        assert read(plan.pieces(), keys) == everything(40)
    assert world.store._verbs.plans._reading.engine.stats().failed == 0
    world.close()


def test_a_tier_without_files_is_read_with_its_own_read():
    disk = MemoryDisk()
    world = World(host_blocks=64, device_blocks=0, disk=disk)
    keys = stored(world, 1, 30)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=3) as plan:
        assert read(plan.pieces(), keys) == everything(30)
        disk.corrupt(keys[11])
        plan.restart()
        with pytest.raises(PlanEnded) as ended:
            read(plan.pieces(), keys)
        assert (ended.value.why, ended.value.key) == (Reason.QUARANTINED, keys[11])
    assert world.residency(keys[11:12]) == (Tier.HOST.bit,)
    world.close()
