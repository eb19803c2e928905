"""Turns of the loop are counted by how long they took, with a clock of the test's own."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from kvstore.core.clock import ManualClock
from kvstore.core.durations import BOUNDS_MS
from kvstore.daemon.collector import PERIOD_S, PERIOD_S_MAX, Collector
from kvstore.daemon.turns import Turns, measured_loop


def test_a_turn_counts_above_each_bound_that_it_passed():
    turns = Turns()
    for seconds in (0.0005, 0.001, 0.0015, 0.006, 0.2):
        turns.count(seconds, seconds / 2)
    over = {"1": 3, "2": 2, "5": 2, "10": 1, "50": 1}
    assert turns.counters() == {
        **{f"loop_turns_over_{bound}_ms": over[str(bound)] for bound in BOUNDS_MS},
        "loop_turn_longest_us": 200_000,
        **{f"loop_work_over_{bound}_ms": {"1": 2, "2": 2}.get(str(bound), 1) for bound in BOUNDS_MS},
        "loop_work_longest_us": 100_000,
    }


def test_what_holds_the_loop_is_seen_and_waiting_is_not():
    now = [1.0]
    worked = [1.0]
    turns = Turns(lambda: now[0], lambda: worked[0])

    def holds():
        now[0] += 0.020
        worked[0] += 0.0078125

    async def run():
        loop = asyncio.get_running_loop()
        loop.call_soon(holds)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # Time that passes in another thread while the loop waits for it is no turn.
        await loop.run_in_executor(None, lambda: None)

    with asyncio.Runner(loop_factory=lambda: measured_loop(turns)) as runner:
        runner.run(run())
    counters = turns.counters()
    assert (counters["loop_turns_over_10_ms"], counters["loop_turns_over_50_ms"]) == (1, 0)
    assert counters["loop_turn_longest_us"] == 20_000
    assert counters["loop_work_longest_us"] == 7_812


def test_what_is_there_at_the_start_is_no_part_of_later_collections():
    code = "import gc; from kvstore.daemon.collector import keep_to_the_young; keep_to_the_young()"
    code += "; print(gc.get_freeze_count(), len(gc.get_objects()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    frozen, left = map(int, ran.stdout.split())
    assert frozen > 10 * left


def test_collections_by_themselves_are_of_young_objects_only():
    code = "import gc; from kvstore.daemon.collector import keep_to_the_young; keep_to_the_young(); seen = set(); "
    code += "gc.callbacks.append(lambda phase, info: seen.add(info['generation'])); "
    code += "kept = [[] for _ in range(1_000_000)]; print(sorted(seen))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[0, 1]\n"


def test_everything_is_collected_in_quiet_moments_and_at_last_in_others():
    clock = ManualClock()
    collector = Collector(clock)
    told = []
    for seconds, quiet in [(PERIOD_S - 1, True), (1, False), (0, True), (PERIOD_S_MAX - 1, False), (1, False)]:
        clock.advance(seconds)
        told.append(collector.tick(quiet=quiet))
    assert told == [False, False, True, False, True]
