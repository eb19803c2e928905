"""The run: prefill to each length, ask for its needles, and note what every step took and read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import Unavailable
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.forcing import Watched
from kvstore.engine.needle import Haystack
from kvstore.engine.params import SamplingParams
from kvstore.engine.sequence import RequestId
from kvstore.engine.weights import Model
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.limits import DISK_DEPTH, disk_bandwidth
from kvstore.tools.kvbench.processes import resident_bytes
from kvstore.tools.kvbench.rows import median
from kvstore.tools.million.plan import CHUNK_TOKENS, Plan

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step: seconds, and bytes that attention read by tier; ``waited_s`` of it were for storage."""

    seconds: float
    nbytes: dict[str, int]
    waited_s: float


@dataclass(slots=True)
class Reached:
    """One length: its prefill, and its answers by depth (token found, token wanted)."""

    length: int
    computed: int = 0
    prefill_s: float = 0.0
    answers: list[tuple[float, int, int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)

    @property
    def right(self) -> int:
        """Needles answered with their value."""
        return sum(found == wanted for _, found, wanted in self.answers)

    @property
    def fastest_s(self) -> float:
        """The fastest of the decode steps."""
        return min(step.seconds for step in self.steps)

    @property
    def step_s(self) -> float:
        """Median of the decode steps."""
        return median([step.seconds for step in self.steps])


@dataclass(slots=True)
class Found:
    """All that was measured. Memory is that of engine and daemon together, at its peak."""

    reached: list[Reached]
    disk_bytes_per_s: float
    peak_bytes: int = 0
    start_bytes: int = 0


def run(model: Model, plan: Plan, folder: Path, say: Say) -> Found:
    """Run a plan over a daemon with data in ``folder``. Raises Unavailable if a request ends early."""
    spec = EngineConfig(kv_dtype="float16").spec_for(model.spec)
    flags = {**plan.flags(spec), "ssd-dir": str(folder / "ssd"), "ssd-free-floor": "256 MiB"}
    haystacks = plan.haystacks()
    disk = disk_bandwidth(folder)
    say(f"the disk reads {disk / 1e9:.2f} GB/s (O_DIRECT, 4 MiB, depth {DISK_DEPTH})")
    with DaemonProcess(folder, flags) as daemon:
        daemon.start()
        options = ClientOptions(name="million", strict=True, buffer_bytes=plan.buffer_bytes(spec))
        with Client(daemon.socket, options) as client:
            config = EngineConfig(
                name="million", kv_dtype="float16", token_budget=CHUNK_TOKENS, running_max=1, device="cpu"
            )
            engine = Engine(model, client, config)
            found = Found([], disk)
            found.start_bytes = resident_bytes([os.getpid(), daemon.pid])
            try:
                for length in plan.lengths:
                    asked = _Asked(engine, haystacks[length], [os.getpid(), daemon.pid], say)
                    found.reached.append(asked.run())
                    found.peak_bytes = max(found.peak_bytes, asked.peak_bytes)
            finally:
                engine.close()
    found.disk_bytes_per_s = max(disk, disk_bandwidth(folder))
    return found


class _Asked:
    """One request: the haystack, and then its keys one after the other, each in place of the answer before it."""

    def __init__(self, engine: Engine, haystack: Haystack, pids: list[int], say: Say) -> None:
        self._engine, self._haystack = engine, haystack
        self._pids, self._say = pids, say
        self.peak_bytes = 0

    def run(self) -> Reached:
        """Prefill and ask. Raises Unavailable if the request ends before all answers are there."""
        keys, engine = list(self._haystack.answers), self._engine
        reached = Reached(len(self._haystack.tokens))
        watched = Watched(keys[1:] + keys[:1])
        params = SamplingParams(tokens_max=len(keys), ignore_eos=True)
        before, begun = engine.counters.tokens_computed, time.perf_counter()
        request = engine.add_request(self._haystack.ask(keys[0]), params, draw=watched)
        told = begun
        while engine.has_work:
            decodes = bool(watched.choices)
            with self._timed(reached, decodes=decodes):
                outputs = engine.step()
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._pids))
            if any(output.token is None for output in outputs):
                raise Unavailable(f"the request ended early: {outputs[-1].reason}")
            now, computed = time.perf_counter(), engine.counters.tokens_computed - before
            if not decodes:
                reached.prefill_s, reached.computed = now - begun, computed
                if now - told > 10.0:
                    told = now
                    self._say(self._progress(request, computed, now - begun))
        for key, choice in zip(keys, watched.choices, strict=True):
            place = self._haystack.tokens.index(key)
            depth = (place - 1) / max(1, reached.length - 3)
            reached.answers.append((depth, choice.token, self._haystack.answers[key]))
        self._say(
            f"{reached.length:,} tokens: {reached.right} of {len(keys)} needles, step {reached.step_s:.3f} s, "
            f"prefill of {reached.computed:,} tokens {reached.prefill_s:.0f} s"
        )
        return reached

    @contextmanager
    def _timed(self, reached: Reached, *, decodes: bool) -> Iterator[None]:
        counters = self._engine.counters
        attended, waited, steps = dict(counters.bytes_attended), counters.cold_wait_s, counters.steps
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        if decodes and counters.steps > steps:
            read = {name: count - attended[name] for name, count in counters.bytes_attended.items()}
            reached.steps.append(Step(seconds, read, counters.cold_wait_s - waited))

    def _progress(self, request: RequestId, computed: int, seconds: float) -> str:
        at = self._engine.progress(request)
        if at is None:
            return "the request has ended"
        left = (at.known - at.computed) * seconds / max(1, computed)
        return f"{at.computed:,} of {at.known:,} tokens, {computed / seconds:,.0f} tokens/s, {left:,.0f} s left"
