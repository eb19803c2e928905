"""``kvbench plan``: reading plans beside raw direct I/O on the same files, what control costs, who gets the disk."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey, Durability, NamespaceId, Outcome, Target
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.limits import scratch_directory
from kvstore.tools.kvbench.rows import Row, median, rate, take_turns
from kvstore.tools.kvbench.sharing import Reading, run_sharing
from kvstore.tools.kvbench.workload import Chain, opaque_spec

SLICE_BYTES: Final = 12_864
"""A slice of SmolLM2-135M in int8: 3 KV heads of 64, 64 tokens."""
RUN_BLOCKS: Final = 64
"""Blocks that are written together, and whose slices of a layer lie together."""
PIECE_BYTES: Final = 4 << 20
PIECES: Final = 6
LANES: Final = 4
"""Reads under way in the raw form, as many as a daemon's threads for plans."""
READ_BYTES: Final = 4 << 20
BEFORE_US: Final = 62.0
"""Processor time of the daemon a block before there were plans, through ``fetch`` into the buffer."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is read, and how often."""

    blocks: int = 4096
    layers: int = 12
    rounds: int = 5
    share_s: float = 3.0
    """How long two processes read at once, each round."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What is on SSD: keys of one chain, whose blocks are opaque slices of ``SLICE_BYTES``."""

    namespace_id: NamespaceId
    keys: list[BlockKey]
    layers: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return len(self.keys) * SLICE_BYTES


def run_plan(directory: Path, effort: Effort) -> list[Row]:
    """All rows, in a folder under ``directory`` that is gone afterwards."""
    with scratch_directory(directory) as folder, ExitStack() as stack:
        total = 2 * effort.blocks * effort.layers * SLICE_BYTES
        flags = {
            "host": "256 MiB",
            "device": "0",
            "ssd": str(5 * total // 4 + (1 << 30)),
            "ssd-dir": str(folder / "ssd"),
        }
        daemon = stack.enter_context(DaemonProcess(folder, {**flags, "ssd-free-floor": "0"}))
        daemon.start()
        options = ClientOptions(strict=True, buffer_bytes=128 << 20, name="kvbench plan")
        client = stack.enter_context(Client(daemon.socket, options))
        spec = opaque_spec("plan", layers=effort.layers, block_bytes=SLICE_BYTES * effort.layers)
        stored, other = (_fill(client, spec, effort, start) for start in range(2))
        raw = RawReads(sorted((folder / "ssd").glob("segment-*")))
        stack.callback(raw.close)
        reading = Reading(daemon.socket, spec, PIECE_BYTES, PIECES)
        return [
            *_rates(raw, daemon.pid, client, stored, effort),
            run_sharing(reading, [stored.keys, other.keys], effort.share_s, effort.rounds),
        ]


def _fill(client: Client, spec: NamespaceSpec, effort: Effort, start: int) -> Stored:
    namespace_id = client.open_namespace(spec).namespace_id
    chain = Chain.fresh(spec, effort.blocks, start)
    noise = random.Random(1).randbytes(SLICE_BYTES * effort.layers)
    for begin in range(0, len(chain.keys), RUN_BLOCKS):
        part = slice(begin, begin + RUN_BLOCKS)
        keys = chain.keys[part]
        blocks = PutBlocks(keys, chain.parents[part], [noise] * len(keys), durability=Durability.DURABLE)
        if set(client.put(namespace_id, blocks).outcomes) != {Outcome.HIT}:
            raise Unavailable("blocks were not stored")
    return Stored(namespace_id, chain.keys, effort.layers)


class RawReads:
    """Direct reads of the files that plans read, with threads and memory as a daemon's: the disk's own speed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        self._sizes = [os.fstat(fd).st_size for fd in self._files]
        self._pool = ThreadPoolExecutor(LANES)
        self._memory = [mmap.mmap(-1, READ_BYTES) for _ in range(LANES)]
        for memory in self._memory:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)

    def read(self, nbytes: int, size: int, stride: int) -> None:
        """Read ``nbytes`` in pieces of ``size``, each ``stride`` behind the one before."""
        places: list[tuple[int, int]] = []
        file = at = 0
        while len(places) * size < nbytes:
            if at + size > self._sizes[file]:
                file, at = (file + 1) % len(self._files), 0
                continue
            places.append((file, at))
            at += stride

        def lane(number: int) -> None:
            into = memoryview(self._memory[number])[:size]
            for which, offset in places[number::LANES]:
                os.preadv(self._files[which], [into], offset)

        for done in [self._pool.submit(lane, number) for number in range(LANES)]:
            done.result()

    def close(self) -> None:
        """Close the files."""
        self._pool.shutdown()
        for fd in self._files:
            os.close(fd)


def _rates(raw: RawReads, pid: int, client: Client, stored: Stored, effort: Effort) -> list[Row]:
    blocks, layers = len(stored.keys), stored.layers
    # Whole pages of what one layer of a run takes, and the distance to the next run's.
    run = RUN_BLOCKS * (SLICE_BYTES + -SLICE_BYTES % 512)
    size = run + -run % 4096
    opened = time.perf_counter()
    with client.plan(
        stored.namespace_id, stored.keys, piece_bytes=PIECE_BYTES, pieces=PIECES, start=False, idle_ms=600_000
    ) as plan:
        opened = time.perf_counter() - opened
        if not plan.keys_mask.all():
            raise Unavailable("blocks that were stored are not in the plan")
        control: dict[str, list[float]] = {"all": [], "layer": []}

        def measured(name: str, begin: Callable[[], object], slices: int) -> None:
            before = _control_seconds(pid)
            begin()
            for _ in plan.pieces():
                pass
            control[name].append((_control_seconds(pid) - before) / slices * 1e6)

        middle = layers // 2
        seconds = take_turns(
            {
                "raw all": lambda: raw.read(stored.layer_bytes * layers, READ_BYTES, READ_BYTES),
                "all": lambda: measured("all", plan.restart, blocks * layers),
                "raw layer": lambda: raw.read(stored.layer_bytes, size, layers * run),
                "layer": lambda: measured("layer", lambda: plan.queue(middle), blocks),
            },
            effort.rounds,
            warm_up=1,
        )
    conditions = {
        "blocks": blocks, "layers": layers, "slice_bytes": SLICE_BYTES, "piece_bytes": PIECE_BYTES, "pieces": PIECES,
        "rounds": effort.rounds, "open_us_a_block": opened / blocks * 1e6,
        "control": "all processor time of daemon and reader but that of the threads that read and check",
    }  # fmt: skip
    return _rows(stored, seconds, control, _fetched(pid, client, stored, middle), conditions)


def _rows(
    stored: Stored,
    seconds: dict[str, list[float]],
    control: dict[str, list[float]],
    fetched: tuple[float, float],
    conditions: dict[str, object],
) -> list[Row]:
    blocks, layers, (fetch_us, fetch_s) = len(stored.keys), stored.layers, fetched
    return [
        *(
            Row(
                bench="plan",
                case=f"read {what}",
                value=rate(nbytes, median(seconds[name])),
                unit="MB/s",
                limit=rate(nbytes, median(seconds[f"raw {name}"])),
                limit_unit="MB/s",
                limit_name="raw O_DIRECT, same files and threads",
                peers={"fetch into the buffer": rate(stored.layer_bytes, fetch_s)} if name == "layer" else {},
                peers_measured=True,
                conditions=conditions,
            )
            for name, what, nbytes in (
                ("layer", f"one layer of {blocks:,} blocks", stored.layer_bytes),
                ("all", f"{layers} layers of {blocks:,} blocks", stored.layer_bytes * layers),
            )
        ),
        *(
            Row(
                bench="plan",
                case=f"control of {what}",
                value=median(control[name]),
                unit="us a slice",
                peers={"fetch into the buffer": fetch_us, "the same before plans": BEFORE_US}
                if name == "layer"
                else {},
                peers_measured=True,
                conditions=conditions,
            )
            for name, what in (("layer", "one layer"), ("all", f"{layers} layers"))
        ),
    ]


def _fetched(pid: int, client: Client, stored: Stored, layer: int) -> tuple[float, float]:
    """Control a slice, in us, and seconds, of one layer by ``fetch`` into the buffer."""
    before, begin = _control_seconds(pid), time.perf_counter()
    for at in range(0, len(stored.keys), 1024):
        lease = client.grant_lease("kvbench", 60_000)
        found = client.fetch(
            stored.namespace_id, stored.keys[at : at + 1024], Target.BUFFER, lease_id=lease, layers=(layer, layer + 1),
            wait_ms=60_000,
        )  # fmt: skip
        if set(found.outcomes) != {Outcome.HIT}:
            raise Unavailable("blocks that were stored do not come")
        client.release(lease)
    seconds = time.perf_counter() - begin
    return (_control_seconds(pid) - before) / len(stored.keys) * 1e6, seconds


def _control_seconds(pid: int) -> float:
    """Processor time of this process and of a daemon's, without the threads that read for plans."""
    ticks = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(")")
        except FileNotFoundError:
            continue
        if name != "kv-plan":
            fields = rest.split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()
