"""Processes that read different contexts by reading plans at once: what each gets of what one alone gets."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvstore.client import Client, ClientOptions
from kvstore.client.plan import Plan
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey
from kvstore.tools.kvbench.rows import Row, median


@dataclass(frozen=True, slots=True)
class Reading:
    """What each process reads, all layers over and over, and through which ring."""

    socket: Path
    spec: NamespaceSpec
    piece_bytes: int
    pieces: int


def run_sharing(reading: Reading, contexts: Sequence[Sequence[BlockKey]], seconds: float, rounds: int) -> Row:
    """One process a context: each alone, and all at once, in turns. Raises Unavailable."""
    with _reader(reading, contexts[0]) as first, _reader(reading, contexts[1]) as second:
        pipes = [first, second]
        alone: list[list[float]] = [[], []]
        together: list[list[float]] = [[], []]
        for _ in range(rounds):
            for number, pipe in enumerate(pipes):
                alone[number] += _rates([pipe], seconds)
            for found, value in zip(together, _rates(pipes, seconds), strict=True):
                found.append(value)
    single = [median(values) for values in alone]
    shared = [median(values) for values in together]
    return Row(
        bench="plan",
        case="two processes at once, different contexts: what the slower one gets",
        value=min(shared) / (sum(single) / len(single)),
        unit="of what one alone gets",
        target=">= 0.4",
        conditions={
            "alone_mb_per_s": [round(value / 1e6) for value in single],
            "together_mb_per_s": [round(value / 1e6) for value in shared],
            "seconds": seconds,
            "rounds": rounds,
        },
    )


def _rates(pipes: Sequence[Connection], seconds: float) -> list[float]:
    """Bytes a second of these processes, reading at the same time."""
    for pipe in pipes:
        pipe.send(seconds)
    return [_answer(pipe) for pipe in pipes]


def _answer(pipe: Connection) -> float:
    try:
        answer: float = pipe.recv()
    except EOFError as error:
        raise Unavailable("a process that reads by a plan ended early") from error
    return answer


@contextmanager
def _reader(reading: Reading, keys: Sequence[BlockKey]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, reading, list(keys)))
    process.start()
    there.close()
    try:
        if _answer(here) != len(keys):
            raise Unavailable("blocks that were stored are not in the plan")
        yield here
    finally:
        here.close()
        process.join()


def _serve(pipe: Connection, reading: Reading, keys: list[BlockKey]) -> None:
    """In a process of its own: say how many keys are in the plan, then read for as long as each message says."""
    size, slots = reading.piece_bytes, reading.pieces
    options = ClientOptions(strict=True, buffer_bytes=2 * size * slots, name="kvbench reader")
    with Client(reading.socket, options) as client:
        namespace = client.open_namespace(reading.spec).namespace_id
        plan = client.plan(namespace, keys, piece_bytes=size, pieces=slots, start=False, idle_ms=600_000)
        pipe.send(int(plan.keys_mask.sum()))
        while True:
            try:
                seconds = pipe.recv()
            except EOFError:
                return
            pipe.send(_read(plan, seconds))


def _read(plan: Plan, seconds: float) -> float:
    """Bytes a second over at least so many seconds; a pass is always queued behind the one that is read."""
    begun, count = time.monotonic(), 0
    plan.restart()
    while True:
        plan.restart(ahead=True)
        for piece in plan.pieces():
            count += piece.data.nbytes
            spent = time.monotonic() - begun
            if spent >= seconds:
                return count / spent
