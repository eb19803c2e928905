"""What a daemon does for one client, and for two hundred: put and get of four blocks, mixed, all at the same time.

Clients are sessions of their own in threads of a few processes, since two hundred interpreters would measure the
machine's memory. ``python -m kvstore.tools.kvbench.crowd SOCKET CLIENTS`` is one of these processes.
"""

from __future__ import annotations

import json
import socket as socket_module
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvstore.client import Client, ClientOptions, PutBlocks, aligned_buffer
from kvstore.core.errors import Unavailable
from kvstore.core.types import Outcome
from kvstore.tools.kvbench.limits import MemoryCopies, echo, noise
from kvstore.tools.kvbench.processes import process_seconds
from kvstore.tools.kvbench.rows import median, percentile, take_turns
from kvstore.tools.kvbench.workload import Chain, opaque_spec

COUNTS: Final = (1, 2, 8, 32, 128, 200)
PROCESSES_MAX: Final = 8
BATCH: Final = 4
BLOCK_BYTES: Final = 256 << 10
BUFFER_BYTES: Final = 2 * BATCH * BLOCK_BYTES
READY_SECONDS: Final = 120
CLIENTS_MAX: Final = 500
"""The sessions of all counts are connected at once, and a uid may have 768."""
COPY_THREADS: Final = 2
LIMIT_CALLS: Final = 50
REQUEST: Final = bytes(34 * BATCH)
_PEER: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Effort:
    """How often all counts are measured in turn, and for how long each time."""

    rounds: int = 5
    seconds: float = 2.0
    counts: Sequence[int] = COUNTS


@dataclass(frozen=True, slots=True)
class Round:
    """What so many clients did in one round: seconds of each call, misses, processor time, and limits beside it."""

    seconds: float
    puts: Sequence[float]
    gets: Sequence[float]
    misses: int
    daemon_s: float
    """Processor time of the daemon."""
    clients_s: float
    """The same of the clients' processes."""
    copies: float = 0.0
    """Copies of the same bytes a second, just before and after."""
    echoes: float = 0.0
    """Messages of the same size there and back a second, over one raw socket, just before and after."""

    @property
    def calls(self) -> int:
        """Puts and gets of all clients."""
        return len(self.puts) + len(self.gets)

    @property
    def per_second(self) -> float:
        """Calls of all clients together."""
        return self.calls / self.seconds

    @property
    def of_copies(self) -> float:
        """Calls over copies: what else the machine does falls on both."""
        return self.per_second / self.copies


@dataclass(frozen=True, slots=True)
class Crowd:
    """What so many clients did in all rounds."""

    clients: int
    rounds: list[Round] = field(default_factory=list)

    def middle(self, value: Callable[[Round], float]) -> float:
        """The median of a figure over the rounds."""
        return median([value(one) for one in self.rounds])

    @property
    def per_second(self) -> float:
        """Calls of all clients together."""
        return self.middle(lambda one: one.per_second)

    def milliseconds(self, verb: str, share: float) -> float:
        """How long that share of the puts or gets of all rounds took at most."""
        return percentile([each for one in self.rounds for each in getattr(one, verb)], share) * 1e3


def run_crowd(socket: str, effort: Effort) -> list[Crowd]:
    """Measure all numbers of clients in turns on the daemon at ``socket``. Raises Unavailable if a client fails."""
    copies = MemoryCopies(BLOCK_BYTES, BATCH, COPY_THREADS)
    found = [Crowd(count) for count in sorted(set(effort.counts))]
    with ExitStack() as stack:
        processes = [stack.enter_context(_crowd(socket, one.clients)) for one in found]
        call = stack.enter_context(echo(16 * BATCH))
        daemon = _pid_behind(socket)
        limits: dict[str, Callable[[], object]] = {"copies": copies, "echoes": lambda: call(REQUEST)}
        for _ in range(effort.rounds):
            for one, its in zip(found, processes, strict=True):
                before = take_turns(limits, LIMIT_CALLS)
                measured = _measure(its, daemon, effort.seconds)
                after = take_turns(limits, LIMIT_CALLS)
                copied, echoed = (1 / median(before[name] + after[name]) for name in limits)
                one.rounds.append(replace(measured, copies=copied, echoes=echoed))
    copies.close()
    return found


def _pid_behind(path: str) -> int:
    """The process that listens there, as this one sees it."""
    with socket_module.socket(socket_module.AF_UNIX) as asked:
        asked.connect(path)
        credentials = asked.getsockopt(socket_module.SOL_SOCKET, socket_module.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(credentials)[0])


@contextmanager
def _crowd(socket: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with ``count`` clients, connected and waiting for a round."""
    processes: list[subprocess.Popen[str]] = []
    shares = [len(range(start, count, PROCESSES_MAX)) for start in range(min(count, PROCESSES_MAX))]
    try:
        for share in shares:
            command = [sys.executable, "-m", "kvstore.tools.kvbench.crowd", socket, str(share)]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in processes:
            _answer(process)
        yield processes
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            process.wait(READY_SECONDS)


def _answer(process: subprocess.Popen[str]) -> Any:
    line = "" if process.stdout is None else process.stdout.readline()
    if not line:
        raise Unavailable(f"a process of clients ended with {process.wait(READY_SECONDS)}")
    return json.loads(line)


def _measure(processes: Sequence[subprocess.Popen[str]], daemon: int, seconds: float) -> Round:
    """One round of all processes at the same time, without its limits."""
    before = process_seconds(daemon)
    for process in processes:
        if process.stdin is not None:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
    answers = [_answer(process) for process in processes]
    spent = process_seconds(daemon) - before
    puts, gets = ([each for answer in answers for each in answer[verb]] for verb in ("puts", "gets"))
    if not (puts and gets):
        raise Unavailable(f"no put or no get ended within {seconds:g} s")
    misses, clients_s = (sum(answer[name] for answer in answers) for name in ("misses", "processor_s"))
    return Round(seconds, puts, gets, misses, spent, clients_s)


# ---------------------------------------------------------------- one process of clients


class _Worker:
    """One client: puts four blocks that are new, then reads them back, on and on."""

    def __init__(self, socket: str, payloads: Sequence[object]) -> None:
        options = ClientOptions(
            name="kvbench crowd", strict=True, device=False, copy_threads=1, buffer_bytes=BUFFER_BYTES, timeout_s=30.0
        )
        self._client = Client(socket, options)
        self._spec = opaque_spec("crowd", block_bytes=BLOCK_BYTES)
        self._namespace = self._client.open_namespace(self._spec).namespace_id
        self._payloads = payloads
        self._out = aligned_buffer(BATCH * BLOCK_BYTES)
        self._turn = 0
        self.seconds: dict[str, list[float]] = {}
        self.misses = 0

    def run(self, end: float) -> None:
        """Until ``end`` on the clock of ``perf_counter``; a call that ends later is not counted."""
        self.seconds, self.misses = {"puts": [], "gets": []}, 0
        while True:
            chain = Chain.fresh(self._spec, BATCH, start=self._turn)
            self._turn += 1
            blocks = PutBlocks(chain.keys, chain.parents, self._payloads)
            for verb, call in (
                ("puts", lambda blocks=blocks: self._client.put(self._namespace, blocks)),
                ("gets", lambda keys=chain.keys: self._client.get(self._namespace, keys, out=self._out)),
            ):
                began = time.perf_counter()
                outcomes = call().outcomes
                ended = time.perf_counter()
                if ended > end:
                    return
                self.seconds[verb].append(ended - began)
                self.misses += sum(outcome is not Outcome.HIT for outcome in outcomes)

    def close(self) -> None:
        """End the session."""
        self._client.close()


def main() -> None:
    """Connect, say so, and answer each line, a number of seconds, with what the clients did in that time."""
    payloads = [noise(BLOCK_BYTES, seed) for seed in range(BATCH)]
    workers = [_Worker(sys.argv[1], payloads) for _ in range(int(sys.argv[2]))]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        before = time.process_time()
        end = time.perf_counter() + float(line)
        threads = [threading.Thread(target=worker.run, args=(end,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer: dict[str, Any] = {
            verb: [round(one, 7) for worker in workers for one in worker.seconds[verb]] for verb in ("puts", "gets")
        }
        answer["misses"] = sum(worker.misses for worker in workers)
        answer["processor_s"] = time.process_time() - before
        print(json.dumps(answer), flush=True)
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
