"""The driver by turns, with a clock of the test's own: what is late, stuck, broken or stopped ends with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.errors import InvalidArgument
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine, TokenOutput
from kvstore.engine.params import SamplingParams
from kvstore.engine.sequence import FinishReason
from kvstore.engine.service.driver import Busy, Driver, Ended, Event, Failure, Prefilled, Ticket
from kvstore.engine.service.limits import Limits
from kvstore.engine.service.metrics import Metrics
from tests.engine.families import build_pair, random_prompt

PROMPT = random_prompt(1, 100)
LONG = SamplingParams(tokens_max=1000, ignore_eos=True)


@dataclass
class Bench:
    """A driver whose turns the test makes."""

    driver: Driver
    engine: Engine
    clock: ManualClock
    metrics: Metrics
    left: list[bool] = field(default_factory=list)

    def ask(self, params: SamplingParams = LONG, **options: float) -> tuple[Ticket, list[Event]]:
        events: list[Event] = []
        return self.driver.submit(PROMPT, params, events.append, **options), events  # type: ignore[arg-type]

    def outcome(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value("kvengine_requests_total", {"outcome": name})


@pytest.fixture
def bench() -> Iterator[Bench]:
    config = EngineConfig(token_budget=64, private_bytes=1 << 26)
    engine, clock, left = Engine(build_pair("llama").model, None, config), ManualClock(), []
    metrics = Metrics(engine, 64)
    limits = Limits(requests_max=2, timeout_s=60, stuck_s=10)
    yield Bench(Driver(engine, limits, metrics, clock, lambda: left.append(True)), engine, clock, metrics, left)
    engine.close()


def test_an_answer_is_handed_out_and_counted(bench: Bench) -> None:
    _, events = bench.ask(SamplingParams(tokens_max=3, ignore_eos=True))
    while not events or not isinstance(events[-1], TokenOutput) or events[-1].reason is None:
        bench.driver.turn()
        bench.clock.advance(0.6)
    assert isinstance(events[0], Prefilled)
    assert (events[0].done, events[0].total) == (64, 100)
    assert events[-1].reason is FinishReason.LENGTH
    assert bench.driver.open_requests == 0
    assert bench.outcome("length") == 1


def test_what_is_late_ends_with_a_timeout_and_cannot_ask_for_longer(bench: Bench) -> None:
    _, short = bench.ask(timeout_s=5)
    _, longest = bench.ask(timeout_s=10**6)
    bench.driver.turn()
    bench.clock.advance(6)
    bench.driver.turn()
    assert short[-1] == Ended(Failure.TIMEOUT, "no answer within 5 s")
    bench.clock.advance(55)
    bench.driver.turn()
    assert longest[-1] == Ended(Failure.TIMEOUT, "no answer within 60 s")
    assert (bench.outcome("timeout"), bench.driver.open_requests, len(list(bench.engine._scheduler))) == (2, 0, 0)


def test_what_does_not_move_is_cancelled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _, events = bench.ask()
    bench.driver.turn()
    bench.driver.turn()
    monkeypatch.setattr(bench.engine, "step", list)
    bench.clock.advance(9)
    bench.driver.turn()
    bench.clock.advance(9)
    bench.driver.turn()
    assert not any(isinstance(event, Ended) for event in events)
    bench.clock.advance(2)
    bench.driver.turn()
    assert events[-1] == Ended(Failure.STUCK, "no progress for 10 s")


def test_who_cancels_hears_nothing_more(bench: Bench) -> None:
    ticket, events = bench.ask(SamplingParams(tokens_max=1000, ignore_eos=True))
    bench.driver.turn()
    bench.driver.turn()
    seen = len(events)
    bench.driver.cancel(ticket)
    bench.driver.turn()
    bench.driver.cancel(ticket)
    bench.ask(SamplingParams(tokens_max=1))
    bench.driver.turn()
    bench.driver.turn()
    assert len(events) == seen
    assert bench.outcome("cancelled") == 1


def test_too_many_are_refused(bench: Bench) -> None:
    bench.ask()
    bench.ask()
    with pytest.raises(Busy, match="2 requests are under way"):
        bench.ask()


def test_a_prompt_that_the_engine_refuses_ends_at_once(bench: Bench) -> None:
    events: list[Event] = []
    bench.driver.submit([10**6], LONG, events.append)
    bench.driver.turn()
    (ended,) = events
    assert isinstance(ended, Ended)
    assert ended.failure is Failure.INVALID
    assert bench.driver.open_requests == 0


def test_an_engine_that_fails_ends_everything_and_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[TokenOutput]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(bench.engine, "step", broken)
    _, events = bench.ask()
    bench.driver._run()
    assert events == [Ended(Failure.FAILED, "the engine failed: RuntimeError: out of luck")]
    assert bench.left == [True]
    with pytest.raises(Busy, match="out of luck"):
        bench.ask()


def test_a_stop_ends_what_is_under_way(bench: Bench) -> None:
    _, events = bench.ask()
    bench.driver.start()
    bench.driver.stop()
    assert events[-1] == Ended(Failure.STOPPED, "the server is stopping")
    with pytest.raises(Busy, match="stopping"):
        bench.ask()


@pytest.mark.parametrize("field", ["requests_max", "choices_max", "body_max", "timeout_s", "stuck_s"])
def test_bounds_are_checked(field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"limits.{field}"):
        Limits(**{field: 0})
