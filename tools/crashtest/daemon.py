"""``crashtest --daemon``: a whole kvstored under clients that put durably, get and remove, killed at random moments.

After each kill the records of the closed directory are read, then a new daemon starts on it and is asked for
every block that was acknowledged as durable or that the records name. The judgement is exact:

- a durable block that the records do not name must have been dropped by a line of the dead daemon's log (``trace.py``),
  behind the moment at which it was known to be there, as evicted or as removed when a client had asked for that;
- the new daemon serves what the records name, with the right bytes, and nothing else; what it drops itself before it is
  asked is in its log.

Anything else is lost, and the run ends with what is known of the block. The clients are threads of this process; the
daemon is a process of its own, and is met over its socket only.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.client import Client
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import BlockKey, NamespaceId, Outcome, Reason, WritePolicy
from kvstore.tiers.ssd import LinuxDisk
from kvstore.tiers.ssd.scrub import named_blocks
from kvstore.tools.crashtest.clients import CLIENTS, Clients, ClientTally
from kvstore.tools.crashtest.judge import du
from kvstore.tools.crashtest.known import Fate, Known
from kvstore.tools.crashtest.trace import Trace
from kvstore.tools.daemon_process import KVSTORED, DaemonProcess
from kvstore.v1 import admin_pb2

CAP_BYTES: Final = 64 << 20
FLAGS: Final = {
    "device": "8 MiB", "ssd": f"{CAP_BYTES}", "ssd-free-floor": "0", "ssd-segment": "1 MiB",
    "buffer-max": "8 MiB", "log-level": "debug",
}  # fmt: skip
HOSTS: Final = ("8 MiB", "32 MiB")
"""One of them, and one of the write policies, is chosen by the seed."""
LIFE_SECONDS: Final = (0.3, 4.0)
STOP_SHARE: Final = 0.1
"""Lives that end with SIGTERM and not with SIGKILL."""
BIRTH_SHARE: Final = 0.25
"""Kills behind which the next daemon is killed, too, while it starts."""
BIRTH_SECONDS: Final = (0.2, 1.2)
CHECK_BLOCKS: Final = 16
LEDGER_TRIES: Final = 20
"""The daemon works on while its ledger is compared with the directory: both are taken until nothing moved between."""
READ_TRIES: Final = 10
RETRY_SECONDS: Final = 1.0
FAULTS_MAX: Final = 20
"""Most faults that are told of one loop."""
ABSENT: Final = frozenset({Reason.NEVER_STORED, Reason.EVICTED, Reason.REMOVED, Reason.DROPPED, Reason.QUARANTINED})
"""Reasons that say a block is not here, not that it can not be read now."""


@dataclass(slots=True)
class DaemonTally(ClientTally):
    """Sums over all kills."""

    write_policy: str = ""
    host: str = ""
    loops: int = 0
    killed_at_start: int = 0
    ended_in_order: int = 0
    blocks_judged: int = 0
    evicted: int = 0
    removed: int = 0
    lost: int = 0
    phantoms: int = 0
    drops_undone: int = 0
    """Drops that had not reached the disk at the kill: the blocks are back, and are expected from then on."""
    named_min: int = 0
    """Fewest blocks that the records named after a life in which blocks were evicted: how full the tier stays."""
    du_bytes_max: int = 0
    ready_seconds_max: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the daemon kept its word."""
        return not (self.corrupt or self.lost or self.phantoms or self.faults)


class Torture:
    """The daemon on its folder, what is known of its blocks, and the sums."""

    cap_bytes = CAP_BYTES

    def __init__(self, folder: Path, seed: int, command: Sequence[str] = KVSTORED) -> None:
        self.directory = folder / "ssd"
        self._chance = random.Random(seed)
        self.policy = NamespacePolicy(write=self._chance.choice(list(WritePolicy)))
        host = self._chance.choice(HOSTS)
        self.daemon = DaemonProcess(folder, FLAGS | {"ssd-dir": str(self.directory), "host": host}, command)
        self.tally = DaemonTally(write_policy=self.policy.write.name, host=host)
        self.known = Known()
        self.trace = Trace(self.daemon.log)
        self._runs = False

    def run_loop(self) -> None:
        """Work, kill, read the records, start again, and compare with what was acknowledged."""
        tally = self.tally
        if not self._runs:
            self._start()
        clients = self._clients()
        threads = clients.start([self._chance.randrange(1 << 30) for _ in range(CLIENTS)])
        end = time.monotonic() + self._chance.uniform(*LIFE_SECONDS)
        while time.monotonic() < end and not clients.killed.wait(0.1):
            tally.du_bytes_max = max(tally.du_bytes_max, settled_du(self.directory))
        clients.killed.set()
        evictions = self.trace.evictions
        self._end(threads)
        if self._chance.random() < BIRTH_SHARE:
            self._start_and_kill()
        self.trace.end_of_life()
        named = self._look_at_records()
        if self.trace.evictions > evictions:
            tally.named_min = min(tally.named_min or len(named), len(named))
        born = self.trace.end
        try:
            self._start()
            with clients.connect() as client:
                self._judge(client, clients.open(client), named, born)
            self._check_directory()
        except KVStoreError as error:
            tally.faults.append(f"the daemon failed while it was judged: {type(error).__name__} {error}")
            self.trace.read()
        tally.faults += [f"the daemon's log: {line}" for line in self.trace.errors[:FAULTS_MAX]]
        self.trace.errors.clear()
        tally.loops += 1

    def _end(self, threads: list[threading.Thread]) -> None:
        """Kill the daemon, or now and then end it in order, which makes durable what it had acknowledged in memory."""
        orderly = self._chance.random() < STOP_SHARE
        before = self.trace.incomplete
        try:
            (self.daemon.stop if orderly else self.daemon.kill)()
        except Unavailable as error:
            self.tally.faults.append(f"after SIGTERM: {error}")
        for thread in threads:
            thread.join()
        self.trace.end_of_life()
        if orderly and self.trace.incomplete == before:
            for key, since in self.known.soft.items():
                self.known.witness([key], since)
        self.tally.ended_in_order += orderly
        self.known.soft.clear()
        self._runs = False

    def close(self) -> None:
        """End the daemon, if it still runs."""
        self.daemon.kill()
        self._runs = False

    def _start(self) -> None:
        self.tally.ready_seconds_max = max(self.tally.ready_seconds_max, self.daemon.start())
        self._runs = True

    def _start_and_kill(self) -> None:
        """Start a daemon and kill it at a random moment, most often before it serves."""
        timer = threading.Timer(self._chance.uniform(*BIRTH_SECONDS), lambda: os.kill(self.daemon.pid, signal.SIGKILL))
        timer.start()
        try:
            self.daemon.start()
        except Unavailable:
            self.tally.killed_at_start += 1
        timer.join()
        self.close()

    def _clients(self) -> Clients:
        return Clients(self.daemon.socket, self.policy, self.known, self.trace, self.tally)

    def _look_at_records(self) -> frozenset[BlockKey]:
        """Blocks that the directory of the dead daemon names; its size is within the cap."""
        tally, nbytes = self.tally, du(str(self.directory))
        tally.du_bytes_max = max(tally.du_bytes_max, nbytes)
        if nbytes > CAP_BYTES:
            tally.faults.append(f"du says {nbytes} bytes after a kill, over the cap of {CAP_BYTES}")
        named, damage = named_blocks(LinuxDisk(str(self.directory)))
        tally.faults += [f"after a kill: {text}" for text in damage]
        return named

    def _judge(self, client: Client, namespace: NamespaceId, named: frozenset[BlockKey], born: int) -> None:
        """Read every block that was acknowledged or is named; those that are gone are no longer expected."""
        known, told = self.known, len(self.tally.faults) + FAULTS_MAX
        keys = list(known.durable | dict.fromkeys(named))
        for begin in range(0, len(keys), CHECK_BLOCKS):
            some = keys[begin : begin + CHECK_BLOCKS]
            there = self._read(client, namespace, some)
            self.trace.read()
            for key in some:
                self._judge_one(key, there=key in there, named=key in named, born=born)
        self.tally.blocks_judged += len(keys)
        del self.tally.faults[told:]

    def _read(self, client: Client, namespace: NamespaceId, keys: list[BlockKey]) -> set[BlockKey]:
        """Which blocks the daemon serves. What it can not read now is asked for again."""
        there: set[BlockKey] = set()
        left, why = keys, ""
        for _ in range(READ_TRIES):
            got = client.get(namespace, left)
            self._clients().compare(left, got.payloads)
            answers = list(zip(left, got.outcomes, got.reasons, strict=True))
            there |= {key for key, outcome, _ in answers if outcome is Outcome.HIT}
            unread = [
                (key, f"{outcome.name} {reason.name}") for key, outcome, reason in answers
                if outcome is not Outcome.HIT and not (outcome is Outcome.MISS and reason in ABSENT)
            ]  # fmt: skip
            if not unread:
                return there
            left, why = [key for key, _ in unread], unread[0][1]
            time.sleep(RETRY_SECONDS)
        self.tally.faults.append(f"{len(left)} blocks can not be read: {why}")
        return there

    def _judge_one(self, key: BlockKey, *, there: bool, named: bool, born: int) -> None:
        known, tally = self.known, self.tally
        since = known.durable.get(key)
        drop = self.trace.drops.get(key)
        if there:
            if not named:
                tally.phantoms += 1
                tally.faults.append(f"{key.hex()} is there, though the records do not name it")
            tally.drops_undone += since is not None and drop is not None and since <= drop.at < born
            # It was on SSD when this life began, or it would not be here; so it is expected from now on.
            known.witness([key], born)
            return
        fate = Fate.THERE
        if named:
            # The records were right to name it: only this life can have dropped it.
            known.durable[key] = born
        if key in known.durable:
            fate = known.fate(key, self.trace)
            del known.durable[key]
        elif since is None:
            return
        tally.evicted += fate is Fate.EVICTED
        tally.removed += fate is Fate.REMOVED
        if fate in (Fate.THERE, Fate.SPOILED):
            tally.lost += 1
            where = "named" if named else "not named"
            tally.faults.append(f"{key.hex()} is lost: {where} by the records, known at {since}, {fate.value}, {drop}")

    def _check_directory(self) -> None:
        left = [name for name in os.listdir(self.directory) if name.endswith(".tmp")]
        ledger = real = 0
        port = self.daemon.connect()
        try:
            for _ in range(LEDGER_TRIES):
                before = du(str(self.directory))
                answer = port.call("Admin/DiskUsage", admin_pb2.DiskUsageRequest(), admin_pb2.DiskUsageResponse, 30.0)
                ledger, real = answer.ledger_bytes, settled_du(self.directory)
                if before == real:
                    break
        finally:
            port.close()
        self.tally.faults += [f"{name} was left" for name in left]
        if ledger != real:
            self.tally.faults.append(f"the ledger says {ledger} bytes, du says {real}")
        if real > CAP_BYTES:
            self.tally.faults.append(f"du says {real} bytes, over the cap of {CAP_BYTES}")


def settled_du(directory: Path) -> int:
    """``du`` of a directory whose files come and go meanwhile."""
    while True:
        try:
            return du(str(directory))
        except FileNotFoundError:
            continue
