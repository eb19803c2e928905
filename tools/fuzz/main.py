"""``python -m kvstore.tools.fuzz``: mutated messages to a daemon of its own, over both transports.

A finding is an answer INTERNAL or UNKNOWN (the message is saved), a daemon that dies, a right that stays, or an event
loop that did not turn for longer than the watchdog's bound. Exit status 1 if there is one.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.client import Client
from kvstore.core.errors import KVStoreError
from kvstore.rpc.table import METHODS
from kvstore.tools.chaos.base import settle, warm_up
from kvstore.tools.chaos.ground import Findings, Ground
from kvstore.tools.fuzz.mutate import mutated
from kvstore.tools.fuzz.seeds import STREAMS, Seeds
from kvstore.tools.fuzz.wires import INTERNAL, OPEN, UNKNOWN, GrpcWire, SessionWire
from kvstore.v1 import admin_pb2

RENEW_EVERY: Final = 200
"""Messages after which lease, reservation, remote session and acceptance of blocks are made right again."""

GRPC_ONLY: Final = {*STREAMS, OPEN}
"""What the session socket does not carry, and what has to be remembered to be closed."""


class Fuzzer:
    """A daemon, both wires, and what is counted."""

    def __init__(self, ground: Ground, save: Path, client: Client) -> None:
        self._ground = ground
        self._save = save
        self._rng = ground.rng
        self.seeds = Seeds(client)
        self.session = SessionWire(ground.daemon.socket)
        self.grpc = GrpcWire(ground.daemon.socket)
        self.statuses: Counter[int] = Counter()

    def one(self) -> None:
        """Send one mutated message of any method over either transport."""
        rng = self._rng
        name = rng.choice([*METHODS, *STREAMS])
        data = mutated(rng, self.seeds.request(name))
        over_socket = name not in GRPC_ONLY and rng.random() < 0.7
        if over_socket and rng.random() < 0.05:
            self.session.send_frame(rng, name, data)
            return
        status = self.session.send(name, data) if over_socket else self.grpc.send(rng, name, data)
        self.statuses[status] += 1
        if status in (INTERNAL, UNKNOWN):
            file = self._save / f"{name.replace('/', '.')}-{self.statuses[status]}.bin"
            file.write_bytes(data)
            wire = "session socket" if over_socket else "gRPC"
            self._ground.findings.add(f"{'INTERNAL' if status == INTERNAL else 'UNKNOWN'}: {name}", f"{wire}, {file}")

    def renew(self) -> None:
        """Undo what right messages among the wrong ones did."""
        port = self._ground.daemon.connect()
        try:
            port.call("Admin/Drain", admin_pb2.DrainRequest(resume=True), admin_pb2.DrainResponse, 10.0)
        finally:
            port.close()
        self.grpc.open()
        self.session.again()
        self.seeds.renew()

    def close(self) -> None:
        """End both wires."""
        self.session.close()
        self.grpc.close()


def turns(ground: Ground) -> None:
    """Say how long the daemon's event loop was held: on a busy machine that counts what others took, too."""
    counters = ground.daemon.status().counters
    held = [
        f"{name} {counters[name]}"
        for name in sorted(counters)
        if name.startswith(("loop_turn", "loop_work", "locked_"))
    ]
    print("the event loop: " + ", ".join(held), flush=True)


def unpin(ground: Ground) -> None:
    """What a right Pin pinned stays by design, whoever leaves: take it back by its names."""
    port = ground.daemon.connect()
    try:
        listed = port.call("Admin/ListLeases", admin_pb2.ListLeasesRequest(), admin_pb2.ListLeasesResponse, 10.0)
        for lease in listed.leases:
            if lease.owner == "operator":
                port.call("Admin/Unpin", admin_pb2.UnpinRequest(name=lease.name), admin_pb2.UnpinResponse, 10.0)
    finally:
        port.close()


def stop(ground: Ground) -> None:
    """End the daemon; one that SIGTERM does not end is a finding."""
    try:
        ground.daemon.stop()
    except KVStoreError as error:
        ground.findings.add("silence: SIGTERM does not end the daemon", str(error).splitlines()[0])


def fuzz(messages: int, seed: int, save: Path, folder: Path) -> tuple[Findings, Counter[int]]:
    """Start a daemon, send so many messages, and look at what is left of them."""
    findings = Findings()
    ground = Ground.make(folder, random.Random(seed), findings, watchdog_s="2")
    with ExitStack() as last:
        last.callback(stop, ground)
        ground.daemon.start()
        base = warm_up(ground)
        client = ground.client([])
        fuzzer = Fuzzer(ground, save, client)
        try:
            for number in range(messages):
                if number and number % RENEW_EVERY == 0:
                    fuzzer.renew()
                fuzzer.one()
        except (KVStoreError, OSError) as error:
            findings.add("silence: the daemon", f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            fuzzer.close()
            client.close()
        unpin(ground)
        turns(ground)
        settle(ground, base, f"{messages} messages")
        stalls = ground.daemon.log.read_text(errors="replace").count("the event loop has not turned")
        if stalls:
            findings.add("stall: the event loop", f"{stalls} times for longer than 2 s", stalls)
    return findings, fuzzer.statuses


def run(
    messages: Annotated[int, typer.Option(min=1, help="How many messages.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Chooses all that is chosen.")] = 1,
    save: Annotated[Path | None, typer.Option(help="Where messages that were found are saved.")] = None,
) -> None:
    """Send mutated messages over both transports; exit status 1 with findings."""
    kept = save or Path(tempfile.mkdtemp(prefix="kvfuzz-found-"))
    kept.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvfuzz-") as folder:
        findings, statuses = fuzz(messages, seed, kept, Path(folder))
    print(f"{messages} messages in {time.monotonic() - begin:.0f} s, seed {seed}")
    print("answers by gRPC status (-1: none): " + ", ".join(f"{code}: {n}" for code, n in sorted(statuses.items())))
    for kind, count in sorted(findings.counts.items()):
        print(f"{count:6}  {kind}: {findings.first[kind]}")
    print(f"{sum(findings.counts.values())} findings of {len(findings.counts)} kinds")
    sys.exit(1 if findings.counts else 0)


def main() -> None:
    """Console entry."""
    typer.run(run)
