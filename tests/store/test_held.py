"""How long the store's lock is held is counted, and waiting inside a section is no holding."""

from __future__ import annotations

import contextlib
import threading

import pytest

from kvstore.core.durations import Durations
from kvstore.store.tables import state as states
from kvstore.testing.world import World


@pytest.fixture
def world():
    made = World(host_blocks=2)
    yield made
    made.close()


@pytest.fixture
def ticks(monkeypatch):
    """The clock of locked sections: stands where a test puts it."""
    now = [100.0]
    monkeypatch.setattr(states.time, "perf_counter", lambda: now[0])
    return now


def test_a_long_section_is_counted_and_a_short_one_is_not(world, ticks):
    state = world.store._state
    before = world.store.status().counters["locked_sections_over_5_ms"]
    with state.locked():
        ticks[0] += 0.0005
    with state.locked():
        ticks[0] += 0.007
    with contextlib.suppress(LookupError), state.locked():
        ticks[0] += 0.02
        raise LookupError
    counters = world.store.status().counters
    assert counters["locked_sections_over_5_ms"] - before == 2
    assert counters["locked_section_longest_us"] >= 19_999
    assert not state.lock.locked()


def test_waiting_inside_a_section_is_no_holding(world, ticks):
    state = world.store._state
    before = world.store.status().counters["locked_sections_over_10_ms"]
    woken = threading.Event()

    def wake():
        with state.lock:
            ticks[0] += 5
            woken.set()
            state.changed.notify_all()

    thread = threading.Thread(target=wake)
    with state.locked():
        thread.start()
        assert state.wait_for(woken.is_set, 30)
    thread.join(30)
    assert world.store.status().counters["locked_sections_over_10_ms"] == before


def test_bounds():
    durations = Durations()
    for seconds in (0.001, 0.0011, 0.006, 0.2):
        durations.count(seconds)
    assert durations.counters("turns", "turn") == {
        "turns_over_1_ms": 3, "turns_over_2_ms": 2, "turns_over_5_ms": 2, "turns_over_10_ms": 1, "turns_over_50_ms": 1,
        "turn_longest_us": 200_000,
    }  # fmt: skip
