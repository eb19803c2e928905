"""What the service measures, for Prometheus. Times are observed by the driver; the rest is read when it is asked for.

Nothing says anything of a request: no prompts, no names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kvstore.engine.engine import Engine

WINDOW_S: Final = 10.0
"""Time over which tokens a second and the use of a batch are measured."""

_TIMES: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

COUNTS: Final = {
    "kvengine_steps": ("steps", "forward passes"),
    "kvengine_computed_tokens": ("tokens_computed", "tokens whose K and V were computed, recomputed ones included"),
    "kvengine_generated_tokens": ("tokens_generated", "tokens drawn"),
    "kvengine_preemptions": ("preemptions", "requests that had to give up their memory"),
    "kvengine_blocks_sealed": ("blocks_sealed", "blocks committed to the cache"),
    "kvengine_blocks_demoted": ("blocks_demoted", "blocks moved from DEVICE to HOST for room"),
    "kvengine_blocks_private": ("blocks_private", "blocks of the engine's own memory, since the cache gave none"),
    "kvengine_cache_losses": ("links_lost", "times that the session with the cache ended while in use"),
    "kvengine_steps_discarded": ("steps_discarded", "steps thrown away for that"),
}
"""Counters of the engine, by their metric (``_total`` is added)."""


class Metrics:
    """All metrics of one service."""

    def __init__(self, engine: Engine, token_budget: int) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("kvengine_requests", "answers that ended, by how", ["outcome"], registry=self.registry)
        self.prompt_tokens = Counter(
            "kvengine_prompt_tokens", "tokens of the prompts of whole answers", registry=self.registry
        )
        self.cached_tokens = Counter(
            "kvengine_cached_tokens",
            "tokens of these prompts that were not computed, by the tier that held them (engine: another request)",
            ["source"],
            registry=self.registry,
        )
        self.first_token = self._times("kvengine_first_token_seconds", "from the arrival to the first token")
        self.between_tokens = self._times("kvengine_inter_token_seconds", "between two tokens of an answer")
        self.answer_time = self._times("kvengine_answer_seconds", "from the arrival to the end of a whole answer")
        self._engine = engine
        self._budget = token_budget
        self._window: deque[tuple[float, int, int, int]] = deque()
        self.registry.register(_Now(self._now))

    def text(self) -> bytes:
        """The page of ``/metrics``."""
        return generate_latest(self.registry)

    def stepped(self, now: float) -> None:
        """A step ended."""
        counters = self._engine.counters
        self._window.append((now, counters.steps, counters.tokens_computed, counters.tokens_generated))
        while self._window and self._window[0][0] < now - WINDOW_S:
            self._window.popleft()

    def answered(self, prompt_tokens: int, cached: dict[str, int], seconds: float) -> None:
        """An answer is whole."""
        self.prompt_tokens.inc(prompt_tokens)
        self.answer_time.observe(seconds)
        for source, tokens in cached.items():
            self.cached_tokens.labels(source).inc(tokens)

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_TIMES, registry=self.registry)

    def _now(self) -> Iterator[Family]:
        engine, counters = self._engine, self._engine.counters
        for name, (field, text) in COUNTS.items():
            family = CounterMetricFamily(name, text)
            family.add_metric([], getattr(counters, field))
            yield family
        window = list(self._window)
        seconds = window[-1][0] - window[0][0] if window else 0.0
        steps, computed, generated = (window[-1][i] - window[0][i] if window else 0 for i in (1, 2, 3))
        for name, value, text in (
            ("kvengine_requests_running", engine.running, "requests that hold memory"),
            ("kvengine_requests_waiting", engine.waiting, "requests that wait to be let in"),
            ("kvengine_cache_up", engine.cache_is_up, "1 while the engine has a session with its cache"),
            (
                "kvengine_tokens_per_second",
                generated / seconds if seconds else 0.0,
                f"drawn in the last {WINDOW_S:g} s",
            ),
            (
                "kvengine_batch_use_ratio",
                computed / (steps * self._budget) if steps else 0.0,
                f"tokens of a step as a share of token_budget, in the last {WINDOW_S:g} s",
            ),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))


class _Now(Collector):
    """Values that are read when Prometheus asks."""

    def __init__(self, collect: Callable[[], Iterator[Family]]) -> None:
        self._collect = collect

    def describe(self) -> list[Family]:
        """Nothing: the names are ours alone."""
        return []

    def collect(self) -> Iterator[Family]:
        """The values of now."""
        return self._collect()
