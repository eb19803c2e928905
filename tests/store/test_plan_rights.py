"""The rights of reading plans have one owner, and bounds; whatever ends them gives back everything."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import pytest

from kvstore.client.plan import Plan, PlanEnded
from kvstore.core.errors import InvalidArgument, ResourceExhausted, UnknownPlan
from kvstore.core.types import Area, Outcome, Reason, Target
from kvstore.kernels.plan_engine import wait_landed
from kvstore.testing.world import World
from tests.store.planning import idle, needs_native, read, ssd, stored, world_over_ssd  # noqa: F401  pytest finds the fixture

pytestmark = needs_native


def test_a_ring_that_does_not_fit_says_what_is_needed_and_free(world):
    keys = stored(world, 1, 4)
    with pytest.raises(ResourceExhausted) as refused:
        Plan.open(world.cache, world.namespace_id, keys, piece_bytes=1 << 20, pieces=2)
    assert refused.value.value == str(4096 + (2 << 20))
    assert str(1 << 20) in refused.value.expected
    idle(world)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pieces": 0}, {"pieces": 63}, {"piece_bytes": 0}, {"piece_bytes": 2 << 30}, {"idle_ms": 1},
        {"layers": (0, 4)}, {"layers": (2, 2)},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_and_take_nothing(world, wrong):
    keys = stored(world, 1, 4)
    with pytest.raises(InvalidArgument):
        Plan.open(world.cache, world.namespace_id, keys, **{"piece_bytes": 4096, "pieces": 2, **wrong})
    idle(world)


def test_a_session_without_a_buffer_is_refused(world):
    stored(world, 1, 4)
    bare = world.session("bare")
    with pytest.raises(InvalidArgument, match="buffer"):
        bare.open_plan(world.namespace_id, world.chain(1, 4))
    bare.close()


def test_plans_a_session_and_slices_of_all_are_bounded(tmp_path):
    world = World(host_blocks=64, device_blocks=0, disk=ssd(tmp_path / "ssd"))
    keys = stored(world, 1, 10)
    world.store._state.config = replace(world.config, plans_a_session_max=2, plan_units_max=90)
    small = {"piece_bytes": 4096, "pieces": 1, "start": False}
    first = Plan.open(world.cache, world.namespace_id, keys, **small)
    second = Plan.open(world.cache, world.namespace_id, keys[:5], **small)
    with pytest.raises(ResourceExhausted, match="plans open"):
        Plan.open(world.cache, world.namespace_id, keys, **small)
    with pytest.raises(ResourceExhausted, match=r"plan_units|slices"):
        first.extend(keys)
    second.close()
    first.close()
    idle(world)
    world.close()


def test_another_session_has_no_right_to_a_plan(world):
    keys = stored(world, 1, 4)
    other = world.session("other", buffer_bytes=1 << 16)
    opened = world.cache.open_plan(world.namespace_id, keys, piece_bytes=4096, pieces=1)
    for call in (lambda: other.advance_plan(opened.plan_id), lambda: other.extend_plan(opened.plan_id, keys)):
        with pytest.raises(UnknownPlan):
            call()
    assert other.close_plan(opened.plan_id) is False
    assert world.cache.close_plan(opened.plan_id) is True
    assert world.cache.close_plan(opened.plan_id) is False
    other.close()
    idle(world)


def test_the_end_of_a_session_ends_its_plans(world):
    keys = stored(world, 1, 40)
    session = world.session("reader", buffer_bytes=1 << 17)
    plan = Plan.open(session, world.namespace_id, keys, piece_bytes=4096, pieces=2)
    piece = next(plan.pieces(keep=True))
    assert read([piece], keys)
    session.close()
    idle(world)
    with pytest.raises(PlanEnded):
        plan.restart()
    with pytest.raises(PlanEnded):
        plan._next(1)
    plan.close()


def test_a_reader_that_gives_no_sign_loses_its_plan(world):
    keys = stored(world, 1, 40)
    plan = Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2, idle_ms=5000)
    pieces = plan.pieces(keep=True)
    held = [next(pieces), next(pieces)]
    for _ in range(3):
        world.clock.advance(4)
        world.run()
        held[0].done()
        held = [held[1], next(pieces)]
        assert read(held, keys)
    world.run()
    world.clock.advance(4.9)
    world.run()
    assert world.store._state.owners.plans
    world.clock.advance(0.2)
    world.run()
    idle(world)
    with pytest.raises(PlanEnded) as ended:
        held[0].done()
    assert ended.value.why is Reason.DEADLINE
    with pytest.raises(PlanEnded):
        next(pieces)
    plan.close()


def test_a_reader_that_says_it_gave_back_what_it_never_had_loses_its_plan(world):
    keys = stored(world, 1, 40)
    with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
        next(plan.pieces(keep=True))
        plan._ring[12:16] = (1000).to_bytes(4, "little")
        os.eventfd_write(plan._bell, 1)
        assert wait_landed(plan._ring, 1000, 30).ended
        plan.restart()
        with pytest.raises(PlanEnded):
            read(plan.pieces(), keys)
    idle(world)


def test_nothing_of_many_plans_is_left_behind(world):
    keys = stored(world, 1, 20)
    engine = Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2)
    engine.close()
    idle(world)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with Plan.open(world.cache, world.namespace_id, keys, piece_bytes=4096, pieces=2) as plan:
            next(plan.pieces())
    idle(world)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    idle(world)
    # What it used of the buffer is there for other reads.
    assert set(world.fetch(keys, Target.BUFFER).outcomes) == {Outcome.HIT}
    assert world.cache.memory(Area.BUFFER).nbytes == 1 << 20
