"""What a daemon does for one client, and for two hundred: put and get of four blocks, mixed, all at the same time.

Clients are sessions of their own in threads of a few processes, since two hundred interpreters would measure the
machine's memory. ``python -m kvstore.tools.kvbench.crowd SOCKET CLIENTS`` is one of these processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.client import Client, ClientOptions, PutBlocks, aligned_buffer
from kvstore.core.errors import Unavailable
from kvstore.core.types import Outcome
from kvstore.tools.kvbench.limits import MemoryCopies, noise
from kvstore.tools.kvbench.rows import Row, median, percentile, rate, timed
from kvstore.tools.kvbench.workload import Chain, opaque_spec

COUNTS: Final = (1, 2, 8, 32, 128, 200)
PROCESSES_MAX: Final = 8
BATCH: Final = 4
BLOCK_BYTES: Final = 256 << 10
BUFFER_BYTES: Final = 2 * BATCH * BLOCK_BYTES
READY_SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Effort:
    """How often all counts are measured in turn, and for how long each time."""

    rounds: int = 5
    seconds: float = 2.0
    counts: Sequence[int] = COUNTS


@dataclass(frozen=True, slots=True)
class Crowd:
    """What so many clients did in one round: calls, misses, seconds of each call."""

    clients: int
    seconds: float
    calls: list[float]
    misses: int

    @property
    def per_second(self) -> float:
        """Calls of all clients together."""
        return len(self.calls) / self.seconds


def run_crowd(socket: str, effort: Effort, plot: Path | None = None) -> list[Row]:
    """Rows of ``kvbench crowd``; with ``plot`` a picture of them, too."""
    copies = MemoryCopies(BLOCK_BYTES, BATCH, 2)
    rounds: dict[int, list[Crowd]] = {count: [] for count in effort.counts}
    with ExitStack() as stack:
        crowds = {count: stack.enter_context(_crowd(socket, count)) for count in effort.counts}
        copied: list[float] = []
        for _ in range(effort.rounds):
            copied += [timed(copies) for _ in range(50)]
            for count, processes in crowds.items():
                rounds[count].append(_measure(processes, count, effort.seconds))
    copies.close()
    limit = rate(copies.batch_bytes, median(copied)) * 1e6 / (BATCH * BLOCK_BYTES)
    totals = {count: median([one.per_second for one in found]) for count, found in rounds.items()}
    rows = [_row(count, found, totals, limit) for count, found in rounds.items()]
    least = min(totals[count] / max(t for c, t in totals.items() if c <= count) for count in totals)
    rows.append(
        Row(
            bench="crowd",
            case=f"least total of the best up to there, 1 to {max(totals)} clients",
            value=least,
            unit="of it",
            limit=1.0,
            limit_unit="of it",
            limit_name="no client costs another",
            target=">= 0.9",
        )
    )
    if plot is not None:
        from kvstore.tools.kvbench.crowd_plot import draw_crowd  # noqa: PLC0415 - brings matplotlib

        draw_crowd(rows[:-1], limit, plot)
    return rows


def _row(count: int, found: Sequence[Crowd], totals: dict[int, float], limit: float) -> Row:
    calls = [seconds for one in found for seconds in one.calls]
    return Row(
        bench="crowd",
        case=f"{count} client{'s' if count > 1 else ''}: calls of 4 x 256 KiB, put and get",
        value=totals[count],
        unit="calls/s",
        limit=limit,
        limit_unit="calls/s",
        limit_name="one memcpy of the same bytes, 2 threads",
        conditions={
            "clients": count,
            "p50_ms": round(percentile(calls, 0.5) * 1e3, 3),
            "p99_ms": round(percentile(calls, 0.99) * 1e3, 3),
            "misses": sum(one.misses for one in found),
            "rounds": [round(one.per_second) for one in found],
        },
    )


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


def _measure(processes: Sequence[subprocess.Popen[str]], count: int, seconds: float) -> Crowd:
    """One round of all processes at the same time."""
    for process in processes:
        if process.stdin is not None:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
    answers = [_answer(process) for process in processes]
    return Crowd(
        count, seconds, [one for answer in answers for one in answer["calls"]], sum(a["misses"] for a in answers)
    )


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
        self.calls: list[float] = []
        self.misses = 0

    def run(self, end: float) -> None:
        """Until ``end`` on the clock of ``perf_counter``; a call that ends later is not counted."""
        self.calls, self.misses = [], 0
        while True:
            chain = Chain.fresh(self._spec, BATCH, start=self._turn)
            self._turn += 1
            blocks = PutBlocks(chain.keys, chain.parents, self._payloads)
            for call in (
                lambda blocks=blocks: self._client.put(self._namespace, blocks),
                lambda keys=chain.keys: self._client.get(self._namespace, keys, out=self._out),
            ):
                began = time.perf_counter()
                outcomes = call().outcomes
                ended = time.perf_counter()
                if ended > end:
                    return
                self.calls.append(ended - began)
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
        end = time.perf_counter() + float(line)
        threads = [threading.Thread(target=worker.run, args=(end,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        calls = [round(one, 7) for worker in workers for one in worker.calls]
        print(json.dumps({"calls": calls, "misses": sum(worker.misses for worker in workers)}), flush=True)
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
