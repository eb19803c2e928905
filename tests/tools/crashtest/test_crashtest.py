"""The torture tool itself: it runs, and it would find a loss."""

from __future__ import annotations

import random

import pytest

from kvstore.tools.crashtest.events import Event, pack, unpack
from kvstore.tools.crashtest.judge import Verdict
from kvstore.tools.crashtest.main import Tally, run_loop


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_lose_nothing(tmp_path):
    tally, chance = Tally(), random.Random(5)
    for _ in range(10):
        run_loop(str(tmp_path / "ssd"), tally, chance)
    assert tally.good, tally
    assert tally.acks
    assert tally.reads_checked


def test_a_torn_record_is_left_out():
    data = pack(Event.WRITING, [1, 2]) + pack(Event.DURABLE, [1])
    assert unpack(data[:-1]) == [(Event.WRITING, 1), (Event.WRITING, 2)]


def test_what_must_and_may_be_there():
    tally = Tally()
    told = [(Event.READY, 0), (Event.WRITING, 1), (Event.WRITING, 2), (Event.WRITING, 3), (Event.DURABLE, 1)]
    told += [(Event.DURABLE, 2), (Event.DROPPING, 2), (Event.WRITING, 4), (Event.DROPPING, 4), (Event.DROPPED, 4)]
    tally.hear(told)
    assert (tally.must, tally.may, tally.next_seed) == ({1}, {2, 3}, 5)


@pytest.mark.parametrize(
    "verdict",
    [Verdict(lost=[1]), Verdict(corrupt=[1]), Verdict(phantoms=[1]), Verdict(faults=["over the cap"])],
    ids=["lost", "corrupt", "phantom", "fault"],
)
def test_each_breach_counts(verdict):
    tally = Tally()
    tally.take(Verdict(found=[1, 2]))
    assert tally.good
    assert tally.must == {1, 2}
    tally.take(verdict)
    assert not tally.good


def test_a_directory_over_the_cap_is_a_fault():
    tally = Tally()
    tally.measure(10, cap_bytes=10)
    assert (tally.good, tally.du_bytes_max, tally.du_samples) == (True, 10, 1)
    tally.measure(11, cap_bytes=10)
    assert not tally.good
