"""``crashtest --daemon``: a whole kvstored under clients that put durably, get and remove, killed at random moments.

After each kill a new daemon starts on the folder. Every block that was acknowledged as durable must be there with its
bytes, unless it was evicted. The tier drops the least recently used blocks, and after a restart those that were written
first: so a block may be missing only when blocks of at least a quarter of the cap were put after it. Blocks whose
removal, or that of one before them in their chain, was acknowledged or under way may be there or not: out of reach,
they are the first to be dropped. The clients are threads of this process; the daemon is a process of its own, and is
met over its socket only.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.client import Client, ClientOptions
from kvstore.client.payloads import PutBlocks
from kvstore.core.errors import KVStoreError
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey, Durability, NamespaceId, Outcome
from kvstore.tools.crashtest.judge import du
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.v1 import admin_pb2

CAP_BYTES: Final = 64 << 20
SLICE_BYTES: Final = 16 << 10
SPEC: Final = NamespaceSpec(
    model="crashtest", dtype="opaque", layers=4, kv_heads=1, head_dim=1, block_tokens=4, opaque_slice_bytes=SLICE_BYTES
)
FLAGS: Final = {
    "device": "0", "host": "32 MiB", "ssd": f"{CAP_BYTES}", "ssd-free-floor": "0", "ssd-segment": "1 MiB",
    "buffer-max": "8 MiB", "log-level": "warning",
}  # fmt: skip
CLIENTS: Final = 8
RUN_BLOCKS_MAX: Final = 6
LIFE_SECONDS: Final = (0.3, 4.0)
CHECK_BLOCKS: Final = 16
LEDGER_TRIES: Final = 20
"""The daemon works on while its ledger is compared with the directory: both are taken until nothing moved between."""


def payload_of(key: BlockKey) -> bytes:
    """The bytes of a block."""
    return hashlib.shake_128(key).digest(SPEC.layers * SLICE_BYTES)


@dataclass(slots=True)
class Known:
    """What the clients know of the blocks. The lock guards it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    durable: dict[BlockKey, int] = field(default_factory=dict)
    """Acknowledged blocks, with the bytes that had been put when each was."""
    removing: set[BlockKey] = field(default_factory=set)
    child: dict[BlockKey, BlockKey] = field(default_factory=dict)
    put_bytes: int = 0
    next_chain: int = 0

    def remove(self, keys: list[BlockKey]) -> None:
        """Blocks, and those behind them, may be gone from now on. The lock is held."""
        for key in keys:
            at: BlockKey | None = key
            while at is not None:
                self.removing.add(at)
                at = self.child.get(at)

    def put(self, keys: list[BlockKey]) -> None:
        """Blocks of a chain were acknowledged. The lock is held."""
        self.put_bytes += len(keys) * SPEC.layers * SLICE_BYTES
        self.durable |= dict.fromkeys(keys, self.put_bytes)
        self.child |= itertools.pairwise(keys)


@dataclass(slots=True)
class DaemonTally:
    """Sums over all kills."""

    loops: int = 0
    acks: int = 0
    blocks_acknowledged: int = 0
    removals_acknowledged: int = 0
    reads_checked: int = 0
    blocks_judged: int = 0
    evicted: int = 0
    corrupt: int = 0
    lost: int = 0
    du_bytes_max: int = 0
    ready_seconds_max: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether the daemon kept its word."""
        return not (self.corrupt or self.lost or self.faults)


class Torture:
    """The daemon on its folder, what is known of its blocks, and the sums."""

    cap_bytes = CAP_BYTES

    def __init__(self, folder: Path, seed: int) -> None:
        self.directory = folder / "ssd"
        self.daemon = DaemonProcess(folder, FLAGS | {"ssd-dir": str(self.directory)})
        self.tally = DaemonTally()
        self.known = Known()
        self._chance = random.Random(seed)
        self._killed = threading.Event()

    def run_loop(self) -> None:
        """Start, compare with what was acknowledged before, work, kill."""
        tally = self.tally
        tally.ready_seconds_max = max(tally.ready_seconds_max, self.daemon.start())
        with self._client() as client:
            self._judge(client, client.open_namespace(SPEC).namespace_id)
        self._killed.clear()
        seeds = [self._chance.randrange(1 << 30) for _ in range(CLIENTS)]
        threads = [threading.Thread(target=self._work, args=(random.Random(seed),)) for seed in seeds]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self._chance.uniform(*LIFE_SECONDS)
        while time.monotonic() < end and not self._killed.wait(0.1):
            tally.du_bytes_max = max(tally.du_bytes_max, settled_du(self.directory))
        self._killed.set()
        self.daemon.kill()
        for thread in threads:
            thread.join()
        nbytes = du(str(self.directory))
        tally.du_bytes_max = max(tally.du_bytes_max, nbytes)
        if nbytes > CAP_BYTES:
            tally.faults.append(f"du says {nbytes} bytes after a kill, over the cap of {CAP_BYTES}")
        tally.loops += 1

    def close(self) -> None:
        """End the daemon, if it still runs."""
        self.daemon.kill()

    def _client(self) -> Client:
        options = ClientOptions(name="crashtest", buffer_bytes=4 << 20, strict=True, timeout_s=60.0)
        return Client(self.daemon.socket, options)

    def _work(self, chance: random.Random) -> None:
        """One client, until the daemon is gone."""
        try:
            with self._client() as client:
                namespace = client.open_namespace(SPEC).namespace_id
                while not self._killed.is_set():
                    role = chance.choices((self._put, self._get, self._remove), (6, 3, 1))[0]
                    role(client, namespace, chance)
        except KVStoreError as error:
            if not self._killed.is_set():
                with self.known.lock:
                    self.tally.faults.append(f"a client failed before the kill: {type(error).__name__} {error}")
                self._killed.set()

    def _put(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        with self.known.lock:
            number, self.known.next_chain = self.known.next_chain, self.known.next_chain + 1
        count = chance.randint(1, RUN_BLOCKS_MAX)
        keys = chain_keys(SPEC.namespace_id, [number, *range(1, count * SPEC.block_tokens)], SPEC.block_tokens)
        blocks = PutBlocks(keys, parents_of(keys), [*map(payload_of, keys)], durability=Durability.DURABLE)
        outcomes = client.put(namespace, blocks).outcomes
        good = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.HIT]
        with self.known.lock:
            self.known.put(good)
            self.tally.acks += bool(good)
            self.tally.blocks_acknowledged += len(good)

    def _get(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        keys = self._some(chance, 4)
        got = client.get(namespace, keys)
        for key, payload in zip(keys, got.payloads, strict=True):
            self._compare(key, payload)

    def _remove(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        keys = self._some(chance, 2)
        with self.known.lock:
            self.known.remove(keys)
        outcomes = client.remove(namespace, keys)
        with self.known.lock:
            self.tally.removals_acknowledged += outcomes.count(Outcome.HIT)

    def _some(self, chance: random.Random, count: int) -> list[BlockKey]:
        with self.known.lock:
            return chance.sample(list(self.known.durable), min(count, len(self.known.durable)))

    def _compare(self, key: BlockKey, payload: memoryview | None) -> None:
        if payload is None:
            return
        right = payload == payload_of(key)
        with self.known.lock:
            self.tally.reads_checked += 1
            self.tally.corrupt += not right

    def _judge(self, client: Client, namespace: NamespaceId) -> None:
        """Read every acknowledged block; those that are gone are no longer expected."""
        known, tally = self.known, self.tally
        keys = list(known.durable)
        for begin in range(0, len(keys), CHECK_BLOCKS):
            some = keys[begin : begin + CHECK_BLOCKS]
            for key, payload in zip(some, client.get(namespace, some).payloads, strict=True):
                tally.blocks_judged += 1
                self._compare(key, payload)
                if payload is not None:
                    continue
                put_since = known.put_bytes - known.durable.pop(key)
                if key in known.removing:
                    continue
                if put_since >= CAP_BYTES // 4:
                    tally.evicted += 1
                else:
                    tally.lost += 1
                    tally.faults.append(f"{key.hex()} is lost, {put_since} bytes after it was put")
        known.removing &= known.durable.keys()
        known.child = {key: child for key, child in known.child.items() if key in known.durable}
        self._check_directory()

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
