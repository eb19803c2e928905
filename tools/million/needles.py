"""The run: prefill to each length, ask for its needles; then time steps at all lengths, in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import Unavailable
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.forcing import Watched
from kvstore.engine.needle import FILLERS, Haystack
from kvstore.engine.params import SamplingParams
from kvstore.engine.sequence import RequestId
from kvstore.engine.weights import Model
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.limits import DISK_DEPTH, disk_bandwidth
from kvstore.tools.kvbench.processes import resident_bytes, unshared_bytes
from kvstore.tools.kvbench.rows import median
from kvstore.tools.million.plan import CHUNK_TOKENS, STEPS, TURNS, Plan

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step: seconds, and bytes that attention read by tier; ``waited_s`` of it were for storage."""

    seconds: float
    nbytes: dict[str, int]
    waited_s: float


@dataclass(slots=True)
class Reached:
    """One length: its prefill, its answers by depth (token found, token wanted), and the most memory during it."""

    length: int
    computed: int = 0
    prefill_s: float = 0.0
    answers: list[tuple[float, int, int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    peak_bytes: int = 0

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
class Memory:
    """Bytes that engine and daemon together took, at their peak.

    ``told`` is what they were told to take: DEVICE, HOST, the session's buffer, and the weights. ``code`` is what they
    took beside that before the first token: interpreters, libraries, and the prompts of this run.
    """

    told: int
    code: int = 0
    peak: int = 0

    @property
    def share(self) -> float:
        """What was taken at the peak beside code, of what was told."""
        return (self.peak - self.code) / self.told


@dataclass(slots=True)
class Found:
    """All that was measured."""

    reached: list[Reached]
    disk_bytes_per_s: float
    memory: Memory = field(default_factory=lambda: Memory(1))


def run(model: Model, plan: Plan, folder: Path, say: Say) -> Found:
    """Run a plan over a daemon with data in ``folder``. Raises Unavailable if a request ends early."""
    spec = EngineConfig(kv_dtype="float16").spec_for(model.spec)
    tiers, buffer_bytes = plan.tiers(spec), plan.buffer_bytes(spec)
    sizes = {name: str(nbytes) for name, nbytes in tiers.items()}
    flags = {**sizes, "ssd-dir": str(folder / "ssd"), "ssd-free-floor": "256 MiB"}
    haystacks = plan.haystacks()
    disk = disk_bandwidth(folder)
    say(f"the disk reads {disk / 1e9:.2f} GB/s (O_DIRECT, 4 MiB, depth {DISK_DEPTH})")
    with DaemonProcess(folder, flags) as daemon:
        daemon.start()
        options = ClientOptions(name="million", strict=True, buffer_bytes=buffer_bytes)
        with Client(daemon.socket, options) as client:
            config = EngineConfig(
                name="million", kv_dtype="float16", token_budget=CHUNK_TOKENS, running_max=1, device="cpu"
            )
            engine = Engine(model, client, config)
            pids, weights = [os.getpid(), daemon.pid], _weight_bytes(model)
            memory = Memory(tiers["device"] + tiers["host"] + buffer_bytes + weights)
            memory.code = unshared_bytes(pids) - weights
            found = Found([], disk, memory)
            try:
                each = [_Asked(engine, haystacks[length], pids, say) for length in plan.lengths]
                for asked in each:
                    asked.ask()
                    found.reached.append(asked.reached)
                # In turns, and back again: what else runs on the machine then comes to all lengths alike.
                for turn in range(TURNS):
                    for asked in each if turn % 2 else reversed(each):
                        asked.time_steps()
                    say(f"steps timed, {turn + 1} of {TURNS} turns")
            finally:
                engine.close()
    memory.peak = max(reached.peak_bytes for reached in found.reached)
    found.disk_bytes_per_s = max(disk, disk_bandwidth(folder))
    return found


def _weight_bytes(model: Model) -> int:
    return sum(one.numel() * one.element_size() for one in model.network.parameters())


class _Asked:
    """Requests over one haystack. What they take and read goes to ``reached``."""

    def __init__(self, engine: Engine, haystack: Haystack, pids: list[int], say: Say) -> None:
        self._engine, self._haystack = engine, haystack
        self._pids, self._say = pids, say
        self.reached = Reached(len(haystack.tokens))

    def ask(self) -> None:
        """Prefill, and then ask for the keys one after the other, each in place of the answer before it.

        Raises Unavailable if the request ends before all answers are there.
        """
        keys, reached, engine = list(self._haystack.answers), self.reached, self._engine
        watched = Watched(keys[1:] + keys[:1])
        params = SamplingParams(tokens_max=len(keys), ignore_eos=True)
        before, begun = engine.counters.tokens_computed, time.perf_counter()
        request = engine.add_request(self._haystack.ask(keys[0]), params, draw=watched)
        told = begun
        while engine.has_work:
            decodes = bool(watched.choices)
            self._step()
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
            f"{reached.length:,} tokens: {reached.right} of {len(keys)} needles, "
            f"prefill of {reached.computed:,} tokens {reached.prefill_s:.0f} s"
        )

    def time_steps(self) -> None:
        """Time some decode steps after the haystack, which is stored. Raises Unavailable as ``ask`` does."""
        counters, watched = self._engine.counters, Watched([FILLERS.start] * (STEPS + 1))
        params = SamplingParams(tokens_max=STEPS + 1, ignore_eos=True)
        self._engine.add_request(self._haystack.ask(FILLERS.start), params, draw=watched)
        while self._engine.has_work:
            attended, waited, steps = dict(counters.bytes_attended), counters.cold_wait_s, counters.steps
            decodes = bool(watched.choices)
            seconds = self._step()
            if decodes and counters.steps > steps:
                read = {name: count - attended[name] for name, count in counters.bytes_attended.items()}
                self.reached.steps.append(Step(seconds, read, counters.cold_wait_s - waited))

    def _step(self) -> float:
        """One step of the engine; returns its seconds."""
        begun = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begun
        self.reached.peak_bytes = max(self.reached.peak_bytes, resident_bytes(self._pids))
        if any(output.token is None for output in outputs):
            raise Unavailable(f"the request ended early: {outputs[-1].reason}")
        return seconds

    def _progress(self, request: RequestId, computed: int, seconds: float) -> str:
        at = self._engine.progress(request)
        if at is None:
            return "the request has ended"
        left = (at.known - at.computed) * seconds / max(1, computed)
        return f"{at.computed:,} of {at.known:,} tokens, {computed / seconds:,.0f} tokens/s, {left:,.0f} s left"
