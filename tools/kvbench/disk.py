"""``kvbench disk``: what the SSD tier gets out of the disk, beside raw direct I/O in the same turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import TierError
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec
from kvstore.tiers.base import BlockRead, BlockWrite, DiskHandle, ReadStatus
from kvstore.tiers.header import BlockHeader, pack_header, slice_crcs
from kvstore.tiers.ssd import LinuxDisk, SsdConfig, SsdTier
from kvstore.tools.kvbench import peers
from kvstore.tools.kvbench.inside import busy, fill_inside, lookups, matcher, store_inside
from kvstore.tools.kvbench.limits import DirectFile, noise, scratch_directory, shared_memory
from kvstore.tools.kvbench.rows import Row, median, percentile, rate, take_turns
from kvstore.tools.kvbench.workload import Chain, opaque_spec

RUN_BYTES: Final = 4 << 20
RUN_BLOCKS: Final = 4
LAYERS: Final = 16
"""Blocks of 1 MiB in 16 slices of 64 KiB, four a run: the shape of a mid-sized model's blocks."""
LAYER_RUN_BLOCKS: Final = 64
"""Blocks of 64 tokens in a run of 4,096 tokens."""
LAYER_SLICE_BYTES: Final = 256 << 10
"""One slice of a model with 8 KV heads of 128 in fp16."""
MATCH_KEYS: Final = 512


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure, and on how much: each turn reads and writes ``total_bytes``."""

    rounds: int = 9
    total_bytes: int = 256 << 20
    depth: int = 8
    calls: int = 2000


class CountingDisk(LinuxDisk):
    """The real disk, counting reads and their bytes."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._counting = threading.Lock()
        self.reads: list[int] = []

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """See ``DiskPort``."""
        with self._counting:
            self.reads.append(len(into))
        return super().pread(fd, into, offset)


def run_disk(directory: Path, effort: Effort) -> list[Row]:
    """All rows of ``kvbench disk``, in a folder under ``directory`` that is gone afterwards."""
    with scratch_directory(directory) as folder:
        return [*_runs(folder, effort), *_layer(folder), *_match(folder, effort)]


def open_tier(folder: Path, capacity_bytes: int, port: LinuxDisk | None = None) -> SsdTier:
    """An SSD tier on an empty folder, ready."""
    tier = SsdTier(str(folder), SsdConfig(capacity_bytes=capacity_bytes), port=port)
    for _ in tier.recover():
        raise TierError(f"{folder} is not empty")
    return tier


def touched(nbytes: int) -> memoryview:
    """Memory as arenas have it, page-aligned and there already, so that no page fault is measured."""
    return shared_memory(nbytes).data.cast("B")


class Runs:
    """Runs of blocks of one namespace, written and read with a fixed number under way."""

    def __init__(self, tier: SsdTier, spec: NamespaceSpec, runs: int, run_blocks: int, depth: int) -> None:
        self._tier, self._namespace = tier, spec.namespace_id
        self._spec = spec
        self._layout = BlockLayout.of(spec)
        self._depth, self._runs, self._run_blocks = depth, runs, run_blocks
        self._pool = ThreadPoolExecutor(depth)
        self._order = random.Random(1)
        stored = self._layout.stored_bytes
        self._memory = [touched(run_blocks * stored) for _ in range(depth)]
        self._sources: list[memoryview] = []
        self.written: list[tuple[list[DiskHandle], Chain]] = []
        tier.put_namespace(spec, NamespacePolicy(), "kvbench")
        # Blocks are made once: their bytes and checksums stay, so that writing is all that a turn measures.
        self._made = [self._make(number) for number in range(runs)]

    @property
    def run_bytes(self) -> int:
        """Payload of one run."""
        return self._run_blocks * self._layout.layers * self._layout.slice_bytes

    @property
    def total_bytes(self) -> int:
        """Payload of one turn."""
        return self._runs * self.run_bytes

    def raw_beside(self, folder: Path) -> DirectFile:
        """As many pieces of the same size, from and to the same memory, at the same depth."""
        sources = [memory[: self.run_bytes] for memory in self._sources]
        return DirectFile(folder, self._runs, sources, [memory[: self.run_bytes] for memory in self._memory])

    def _make(self, number: int) -> tuple[Chain, list[BlockWrite]]:
        layout, chain = self._layout, Chain.fresh(self._spec, self._run_blocks, start=number)
        payload = noise(layout.stored_bytes, number % 16).data.cast("B")
        self._sources.append(touched(self._run_blocks * len(payload)))
        blocks = []
        for at, (key, parent) in enumerate(zip(chain.keys, chain.parents, strict=True)):
            stored = self._sources[-1][at * len(payload) : (at + 1) * len(payload)]
            stored[:] = payload
            crcs = slice_crcs(stored[layout.header_bytes :], layout.layers, layout.slice_bytes, layout.slice_stride)
            lengths = (layout.layers, layout.slice_bytes, layout.slice_stride, layout.header_bytes)
            owner = (self._spec.block_tokens, self._spec.namespace_id, key, parent)
            pack_header(BlockHeader(Codec.RAW, *lengths, *owner, crcs), stored)
            blocks.append(BlockWrite(key, parent, Codec.RAW, stored))
        return chain, blocks

    def write(self) -> None:
        """Drop what the last turn wrote, write every run, sync."""
        self._tier.drop([handle for handles, _ in self.written for handle in handles])
        lanes = [self._pool.submit(self._write_lane, lane) for lane in range(self._depth)]
        self.written = [written for lane in lanes for written in lane.result()]
        self._tier.flush()

    def _write_lane(self, lane: int) -> list[tuple[list[DiskHandle], Chain]]:
        done = []
        for chain, blocks in self._made[lane :: self._depth]:
            done.append((self._tier.write(self._namespace, blocks, durable=False), chain))
        return done

    def read(self) -> None:
        """Read every run once, in an order of its own."""
        order = self._order.sample(self.written, len(self.written))
        for lane in [self._pool.submit(self._read_lane, order[n :: self._depth], n) for n in range(self._depth)]:
            lane.result()

    def _read_lane(self, written: Sequence[tuple[list[DiskHandle], Chain]], lane: int) -> None:
        stored, memory = self._layout.stored_bytes, self._memory[lane]
        for handles, chain in written:
            reads = [
                BlockRead(handle, key, memory[n * stored : (n + 1) * stored])
                for n, (handle, key) in enumerate(zip(handles, chain.keys, strict=True))
            ]
            if any(status is not ReadStatus.OK for status in self._tier.read(reads)):
                raise TierError("a block that was written did not come back")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _runs(folder: Path, effort: Effort) -> list[Row]:
    with ExitStack() as stack:
        tier = open_tier(folder / "runs", 8 * effort.total_bytes + (1 << 30))
        stack.callback(tier.close)
        count = effort.total_bytes // RUN_BYTES
        runs = Runs(tier, opaque_spec("disk", layers=LAYERS), count, RUN_BLOCKS, effort.depth)
        stack.callback(runs.close)
        raw = runs.raw_beside(folder)
        stack.callback(raw.close)
        cases: dict[str, Callable[[], object]] = {
            "raw write": raw.write,
            "write": runs.write,
            "raw read": raw.read,
            "read": runs.read,
        }
        seconds = take_turns(cases, effort.rounds, warm_up=1)
    conditions = {
        "run_bytes": RUN_BYTES,
        "depth": effort.depth,
        "bytes": effort.total_bytes,
        "rounds": effort.rounds,
        "checksums": "CRC-32C of every slice",
        "sync": "each turn of writes ends with fdatasync, raw and tier alike",
        "memory": "the same pages, raw and tier alike",
    }
    return [
        Row(
            bench="disk",
            case=f"{verb} runs of 4 MiB, depth {effort.depth}",
            value=rate(runs.total_bytes, median(seconds[verb])),
            unit="MB/s",
            limit=rate(raw.batch_bytes, median(seconds[f"raw {verb}"])),
            limit_unit="MB/s",
            limit_name="raw O_DIRECT, same size and depth",
            target=">= 0.9 of it",
            peers=peers.DISK_READ_1_MIB if verb == "read" else {},
            conditions=conditions,
        )
        for verb in ("read", "write")
    ]


def _layer(folder: Path) -> list[Row]:
    port = CountingDisk(str(folder / "layer"))
    tier = open_tier(folder / "layer", 1 << 30, port)
    try:
        spec = opaque_spec("layer", layers=4, block_bytes=4 * LAYER_SLICE_BYTES)
        runs = Runs(tier, spec, 1, LAYER_RUN_BLOCKS, 1)
        runs.write()
        (handles, chain) = runs.written[0]
        memory = touched(LAYER_RUN_BLOCKS * LAYER_SLICE_BYTES)
        port.reads.clear()
        reads = [
            BlockRead(handle, key, memory[n * LAYER_SLICE_BYTES : (n + 1) * LAYER_SLICE_BYTES], (2, 3))
            for n, (handle, key) in enumerate(zip(handles, chain.keys, strict=True))
        ]
        if any(status is not ReadStatus.OK for status in tier.read(reads)):
            raise TierError("a block that was written did not come back")
        runs.close()
    finally:
        tier.close()
    return [
        Row(
            bench="disk",
            case="one layer of 4,096 tokens",
            value=len(port.reads),
            unit="reads",
            limit=len(memory) / RUN_BYTES,
            limit_unit="reads",
            limit_name="bytes / 4 MiB",
            target="within 2 of it",
            conditions={"bytes": len(memory), "read_bytes": sum(port.reads), "blocks": LAYER_RUN_BLOCKS},
        )
    ]


def _match(folder: Path, effort: Effort) -> list[Row]:
    with ExitStack() as stack:
        tier = open_tier(folder / "match", 8 * effort.total_bytes + (1 << 30))
        stack.callback(tier.close)
        count = effort.total_bytes // RUN_BYTES
        runs = Runs(tier, opaque_spec("busy", layers=LAYERS), count, RUN_BLOCKS, effort.depth)
        stack.callback(runs.close)
        cache = stack.enter_context(store_inside(64 << 20))
        spec = opaque_spec("match", block_bytes=4096)
        chain = Chain.fresh(spec, MATCH_KEYS)
        match = matcher(cache, fill_inside(cache, spec, chain), chain.keys)

        def saturate() -> None:
            runs.write()
            runs.read()

        saturate()
        with busy(saturate, 1) as turns:
            cases = {"match": match, "look up": lookups(chain.keys)}
            seconds = take_turns(cases, effort.calls, warm_up=50)
    conditions = {"calls": effort.calls, "depth": effort.depth, "disk_turns": len(turns)}
    return [
        Row(
            bench="disk",
            case=f"match 512 keys in the store, disk saturated, {name}",
            value=percentile(seconds["match"], share) * 1e3,
            unit="ms",
            limit=percentile(seconds["look up"], share) * 1e3,
            limit_unit="ms",
            limit_name="512 dictionary look-ups",
            target="< 1 ms",
            conditions=conditions,
        )
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    ]
