"""``kvbench restart``: a store with many blocks on SSD is killed; how long until it is warm again, in what memory.

The blocks are in chains of 64, written ``run_blocks`` at a time: each write is an extent. They are small, so that a
million of them need little disk; what a start does depends on their number, on that of their extents and on the
journal, and not on their bytes, which it does not read. Filling and opening are processes of their own: the first is
killed when all is durable, the second begins with nothing in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import ROOT_PARENT, BlockKey, Codec
from kvstore.store.config import StoreConfig
from kvstore.store.store import Store
from kvstore.tiers.base import BlockWrite
from kvstore.tiers.header import BlockHeader, pack_header, slice_crcs
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tools.kvbench.rows import Row

SPEC: Final = NamespaceSpec(
    model="kvbench-restart", dtype="opaque", layers=1, kv_heads=1, head_dim=1, opaque_slice_bytes=512
)
CHAIN_BLOCKS: Final = 64
NOMINAL_BYTES: Final = 80_000
"""20 GB are 250,000 blocks of this size."""
SECONDS_MAX: Final = {250_000: 5.0, 1_000_000: 3.0}
"""So many blocks must be ready within that time."""
INDEX_BYTES_MAX: Final = 160
INDEX_BLOCKS: Final = 250_000
"""So many, or more, must not take more each; what tables have in reserve weighs more on fewer."""
HOST_BYTES: Final = 16 << 20


def run_restart(directory: Path, counts: tuple[int, ...], run_blocks: int = CHAIN_BLOCKS) -> list[Row]:
    """Three rows for each number of blocks. Unavailable if blocks are missing after the kill."""
    rows: list[Row] = []
    with TemporaryDirectory(prefix="kvbench-restart-", dir=directory) as folder:
        # Threads and buffers that a store without blocks has, too.
        fixed = _in_process(_open, folder, 0, run_blocks)["bytes"]
    for blocks in counts:
        with TemporaryDirectory(prefix="kvbench-restart-", dir=directory) as folder:
            _in_process(_fill, folder, blocks, run_blocks)
            found = _in_process(_open, folder, blocks, run_blocks)
        if found["blocks"] != blocks:
            raise Unavailable(f"{found['blocks']} of {blocks} durable blocks came back")
        conditions = {
            "blocks": blocks,
            "nominal_bytes": blocks * NOMINAL_BYTES,
            "blocks_a_chain": CHAIN_BLOCKS,
            "blocks_a_write": run_blocks,
            "tier_seconds": found["tier_seconds"],
            "cpu_seconds": found["cpu_seconds"],
        }
        case = f"{blocks:,} blocks after kill -9, {run_blocks} a write"
        within = min((seconds for count, seconds in SECONDS_MAX.items() if blocks <= count), default=0.0)
        seconds_target = f"<= {within:g} s" if within else ""
        index_target = f"<= {INDEX_BYTES_MAX} B" if blocks >= INDEX_BLOCKS else ""
        for what, value, unit, target in (
            ("ready", found["seconds"], "s", seconds_target),
            ("processor time of it", found["cpu_seconds"], "s", ""),
            ("index", (found["bytes"] - fixed) / blocks, "B a block", index_target),
        ):
            rows.append(
                Row(
                    bench="restart",
                    case=f"{what}, {case}",
                    value=value,
                    unit=unit,
                    target=target,
                    conditions=conditions,
                )
            )
    return rows


def _in_process(work: Any, folder: str, blocks: int, run_blocks: int) -> dict[str, float]:
    """What ``work`` sends before its process ends, in whatever way."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(there, folder, blocks, run_blocks))
    process.start()
    there.close()
    try:
        answer: dict[str, float] = here.recv()
    except EOFError as error:
        process.join()
        raise Unavailable(f"a process of the bench ended with {process.exitcode}") from error
    process.join()
    return answer


def _config(blocks: int, run_blocks: int) -> SsdConfig:
    extent_bytes = 4096 * (2 + run_blocks * 600 // 4096)
    return SsdConfig(capacity_bytes=max(256 << 20, 2 * blocks // run_blocks * extent_bytes + 400 * blocks))


def _fill(pipe: Connection, folder: str, blocks: int, run_blocks: int) -> None:
    """Write the blocks, make them durable, tell so, and die of a kill."""
    tier = SsdTier(folder, _config(blocks, run_blocks))
    list(tier.recover())
    tier.put_namespace(SPEC, NamespacePolicy(), "restart")
    layout = BlockLayout.of(SPEC)
    memory = [memoryview(bytearray(layout.stored_bytes)) for _ in range(run_blocks)]
    parent = ROOT_PARENT
    for first in range(0, blocks, run_blocks):
        run = []
        for number, stored in enumerate(memory[: blocks - first], first):
            run.append(_block(layout, number, parent if number % CHAIN_BLOCKS else ROOT_PARENT, stored))
            parent = run[-1].key
        tier.write(SPEC.namespace_id, run, durable=False)
    tier.flush()
    pipe.send({})
    os.kill(os.getpid(), signal.SIGKILL)


def _block(layout: BlockLayout, number: int, parent: BlockKey, stored: memoryview) -> BlockWrite:
    key = BlockKey(struct.pack(">Q", number * 0x9E3779B97F4A7C15 % (1 << 64)) * 4)
    header_bytes, size = layout.header_bytes, layout.raw_slice_bytes
    stored[header_bytes : header_bytes + 32] = key
    crcs = slice_crcs(stored[header_bytes:], 1, size, layout.raw_slice_stride)
    stride = layout.raw_slice_stride
    header = BlockHeader(
        Codec.RAW, 1, size, stride, header_bytes, SPEC.block_tokens, SPEC.namespace_id, key, parent, crcs
    )
    pack_header(header, stored)
    return BlockWrite(key, parent, Codec.RAW, stored)


def _open(pipe: Connection, folder: str, blocks: int, run_blocks: int) -> None:
    """Open tier and store, and tell how long it took and how much memory grew."""
    host = HostArena(HOST_BYTES)
    before = _private_bytes()
    begin, used = time.monotonic(), time.process_time()
    tier = SsdTier(folder, _config(blocks, run_blocks))
    store = Store(StoreConfig(close_flush_ms=0), host=host, device=None, disk=tier, clock=MonotonicClock())
    store.start()
    found = {
        "seconds": time.monotonic() - begin,
        "cpu_seconds": time.process_time() - used,
        "tier_seconds": tier.report.seconds,
        "blocks": float(tier.report.blocks),
        "bytes": float(_private_bytes() - before),
    }
    pipe.send(found)
    store.close()


def _private_bytes() -> int:
    """Memory of this process that is resident and not shared."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
