"""``python -m kvstore.tools.crashtest``: kill -9 at random moments; what was acknowledged stays, the cap is kept.

Each loop forks a worker, kills it after a random time (now and then before it has recovered), and forks a judge that
reopens the directory and compares. The directory's size is taken again and again while the worker is stopped. Exit
status 0 if nothing was corrupt, lost or resurrected and the cap was kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.tiers.ssd import SsdConfig
from kvstore.tools.crashtest.daemon import Torture
from kvstore.tools.crashtest.events import Event, unpack
from kvstore.tools.crashtest.judge import Expected, Verdict, du, judge
from kvstore.tools.crashtest.worker import Worker

CONFIG: Final = SsdConfig(
    capacity_bytes=16 << 20, segment_bytes=1 << 20, commit_interval_s=0.05, compact_interval_s=0.05,
    journal_bytes=256 << 10, read_threads=4, write_threads=4, io_bytes=1 << 20, read_bytes_in_flight=8 << 20,
    write_bytes_in_flight=8 << 20, io_deadline_s=30.0,
)  # fmt: skip
SAMPLE_SECONDS: Final = 0.1
"""How often a worker is stopped to measure the directory."""
LIFE_SECONDS: Final = (0.05, 2.5)
"""A worker is killed after a random time between these; recovery takes some hundredths of the first."""


@dataclass(slots=True)
class Tally:
    """Sums over all loops, and what the next loop must find."""

    loops: int = 0
    acks: int = 0
    blocks_acknowledged: int = 0
    drops_acknowledged: int = 0
    reads_checked: int = 0
    segments_rewritten: int = 0
    killed_in_recovery: int = 0
    blocks_judged: int = 0
    corrupt: int = 0
    lost: int = 0
    phantoms: int = 0
    du_samples: int = 0
    du_bytes_max: int = 0
    recovery_seconds_max: float = 0.0
    faults: list[str] = field(default_factory=list)
    next_seed: int = 0
    must: set[int] = field(default_factory=set)
    may: set[int] = field(default_factory=set)

    @property
    def good(self) -> bool:
        """Whether the tier kept its word."""
        return not (self.corrupt or self.lost or self.phantoms or self.faults)

    def hear(self, events: list[tuple[Event, int]]) -> None:
        """Take what a worker told, in order."""
        for event, value in events:
            if event is Event.WRITING:
                self.may.add(value)
                self.next_seed = max(self.next_seed, value + 1)
            elif event is Event.DURABLE:
                # A block that another thread has begun to drop stays a maybe.
                if value in self.may:
                    self.may.discard(value)
                    self.must.add(value)
                self.blocks_acknowledged += 1
            elif event is Event.DROPPING:
                self.must.discard(value)
                self.may.add(value)
            elif event is Event.DROPPED:
                self.may.discard(value)
                self.drops_acknowledged += 1
            elif event is Event.CHECKED:
                self.reads_checked += 1
            elif event is Event.WRONG:
                self.corrupt += 1
            elif event is Event.COMMIT:
                self.acks += 1
            elif event is Event.REWRITTEN:
                self.segments_rewritten += value
        self.killed_in_recovery += all(event is not Event.READY for event, _ in events)

    def measure(self, nbytes: int, cap_bytes: int) -> None:
        """Take the size of the directory at one moment."""
        self.du_samples += 1
        self.du_bytes_max = max(self.du_bytes_max, nbytes)
        if nbytes > cap_bytes:
            self.faults.append(f"du says {nbytes} bytes under work, over the cap of {cap_bytes}")

    def take(self, verdict: Verdict) -> None:
        """Take what the judge found: what is there must stay, what is not must never come back."""
        self.loops += 1
        self.blocks_judged += len(verdict.found)
        self.corrupt += len(verdict.corrupt)
        self.lost += len(verdict.lost)
        self.phantoms += len(verdict.phantoms)
        self.faults += verdict.faults
        self.recovery_seconds_max = max(self.recovery_seconds_max, verdict.seconds)
        self.must, self.may = set(verdict.found), set()


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork a process that does ``work`` with the writing end of a pipe; returns its pid and the reading end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    status = 71
    try:
        work(writing)
        status = 0
    finally:
        os._exit(status)


def read_until(fd: int, end: float | None) -> bytes:
    """Everything that comes through a pipe until it closes, or until a time."""
    parts: list[bytes] = []
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready, _, _ = select.select([fd], [], [], left)
        data = os.read(fd, 1 << 20) if ready else b""
        if not data:
            return b"".join(parts)
        parts.append(data)


def watch(worker: tuple[int, int], end: float, directory: str, tally: Tally) -> bytes:
    """What a worker (pid and pipe) tells until a time or its end, stopping it now and then to measure the directory."""
    pid, pipe = worker
    told, sample = b"", time.monotonic() + SAMPLE_SECONDS
    while time.monotonic() < end:
        ready, _, _ = select.select([pipe], [], [], max(0.0, min(end, sample) - time.monotonic()))
        if ready:
            some = os.read(pipe, 1 << 20)
            if not some:
                break
            told += some
        elif time.monotonic() >= sample:
            os.kill(pid, signal.SIGSTOP)
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                raise ChildProcessError(f"the worker ended by itself with {os.waitstatus_to_exitcode(status)}")
            if os.path.isdir(directory):
                tally.measure(du(directory), CONFIG.capacity_bytes)
            os.kill(pid, signal.SIGCONT)
            sample = time.monotonic() + SAMPLE_SECONDS
    return told


def run_loop(directory: str, tally: Tally, chance: random.Random) -> None:
    """One worker, one kill, one judge."""
    seeds = (chance.randrange(1 << 30), tally.next_seed)
    pid, pipe = in_child(lambda writing: Worker(directory, CONFIG, writing, seeds).run())
    told = watch((pid, pipe), time.monotonic() + chance.uniform(*LIFE_SECONDS), directory, tally)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    told += read_until(pipe, None)
    os.close(pipe)
    if not os.WIFSIGNALED(status):
        tally.faults.append(f"a worker ended by itself with status {os.waitstatus_to_exitcode(status)}")
    tally.hear(unpack(told))
    tally.measure(du(directory), CONFIG.capacity_bytes)
    expected = Expected(frozenset(tally.must), frozenset(tally.may), tally.next_seed)
    clean = chance.random() < 0.3
    pid, pipe = in_child(lambda writing: _judge(writing, directory, expected, clean))
    answer = read_until(pipe, None)
    os.close(pipe)
    os.waitpid(pid, 0)
    if not answer:
        tally.faults.append("the judge died")
        tally.loops += 1
        return
    tally.take(Verdict(**json.loads(answer)))


def _judge(pipe: int, directory: str, expected: Expected, clean: bool) -> None:
    verdict = judge(directory, CONFIG, expected, clean=clean)
    data = memoryview(json.dumps(dataclasses.asdict(verdict)).encode())
    while data:
        data = data[os.write(pipe, data) :]


def report(values: dict[str, object], output: str) -> None:
    """Print the sums."""
    if output == "json":
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name:24} {value}")


class Tier:
    """Torture of the tier alone; has what ``daemon.Torture`` has."""

    cap_bytes = CONFIG.capacity_bytes

    def __init__(self, folder: str, seed: int) -> None:
        self._directory = os.path.join(folder, "ssd")
        self._chance = random.Random(seed)
        self.tally = Tally()

    def run_loop(self) -> None:
        """One worker, one kill, one judge."""
        run_loop(self._directory, self.tally, self._chance)

    def close(self) -> None:
        """Nothing runs between loops."""


def run(
    loops: Annotated[int, typer.Option(min=1, help="Kills.")] = 20,
    minutes: Annotated[float, typer.Option(min=0, help="Go on for so long, whatever --loops says.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all chance; printed again at the end.")] = 1,
    daemon: Annotated[bool, typer.Option("--daemon", help="Kill a whole kvstored under clients.")] = False,
    directory: Annotated[str, typer.Option(help="Where to make the tier's folder; default: a temporary one.")] = "",
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Kill a working SSD tier, or a daemon, again and again, and compare what is left with what it had acknowledged."""
    folder = tempfile.mkdtemp(prefix="crashtest-", dir=directory or None)
    subject = Torture(Path(folder), seed) if daemon else Tier(folder, seed)
    tally = subject.tally
    ended = False
    try:
        end, loop = time.monotonic() + 60 * minutes, 0
        while tally.good and (time.monotonic() < end if minutes else loop < loops):
            loop += 1
            subject.run_loop()
            print(f"loop {loop}: {tally.acks} acks, {tally.corrupt} corrupt, {tally.lost} lost", file=sys.stderr)
        ended = True
    finally:
        subject.close()
        if ended and tally.good:
            shutil.rmtree(folder)
        else:
            print(f"the folder is kept: {folder}", file=sys.stderr)
    values = {name: value for name, value in dataclasses.asdict(tally).items() if name not in ("must", "may")}
    report(values | {"seed": seed, "cap_bytes": subject.cap_bytes, "good": tally.good}, output)
    raise typer.Exit(0 if tally.good else 1)


def main() -> None:
    """The command."""
    typer.run(run)
