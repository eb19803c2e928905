"""``kvbench capacity``: how many tokens the same bytes of HOST hold, raw and under int8, as the daemon counts.

The count is that of ``kvctl status``: blocks of HOST, 64 tokens each. A daemon without DEVICE and SSD is filled through
a client with blocks of SmolLM2's shape until it has had to drop some; the figure is the most that it held at one time.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Outcome
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.rows import Row
from kvstore.tools.kvbench.workload import Chain
from kvstore.v1 import common_pb2

CHAIN_BLOCKS: Final = 4
"""Blocks of a put, each put a chain of its own: what is dropped for it is the end of the oldest."""
TARGET: Final = ">= 1.85 times"


def run_capacity(host_mib: int) -> list[Row]:
    """Tokens held raw and in int8, and how many times as many the latter are.

    Raises Unavailable if HOST never fills.
    """
    conditions = {"HOST": f"{host_mib} MiB", "shape": "SmolLM2-135M, fp16", "counted by": "kvctl status, blocks x 64"}
    held = {codec: tokens_held(codec, host_mib) for codec in ("raw", "int8")}
    rows = [
        Row(bench="capacity", case=f"tokens in HOST, {codec}", value=tokens, unit="tokens", conditions=conditions)
        for codec, tokens in held.items()
    ]
    times = held["int8"] / held["raw"]
    limit = bytes_of("raw") / bytes_of("int8")
    rows.append(
        Row(
            bench="capacity",
            case="int8 against raw",
            value=times,
            unit="times",
            limit=limit,
            limit_unit="times",
            limit_name="bytes of a stored block, raw over int8",
            target=TARGET,
            conditions=conditions,
        )
    )
    return rows


def spec_of(codec: str) -> NamespaceSpec:
    """SmolLM2-135M with K and V in fp16."""
    return NamespaceSpec(
        model="kvbench-capacity", revision="1", dtype="float16", layers=30, kv_heads=3, head_dim=64, codec=codec
    )


def bytes_of(codec: str) -> int:
    """Bytes of one stored block."""
    return BlockLayout.of(spec_of(codec)).stored_bytes


def tokens_held(codec: str, host_mib: int) -> int:
    """The most tokens that a daemon with this much HOST held at one time."""
    spec = spec_of(codec)
    # Half as many again as can fit, so that blocks are dropped before the end.
    puts = (host_mib << 20) * 3 // (2 * bytes_of(codec) * CHAIN_BLOCKS) + 1
    most = 0
    with TemporaryDirectory(prefix="kvbench-") as folder:
        flags = {"host": f"{host_mib} MiB", "device": "0"}
        with DaemonProcess(Path(folder), flags) as daemon:
            daemon.start()
            with Client(daemon.socket, ClientOptions(name="capacity", strict=True, device=False)) as client:
                namespace = client.open_namespace(spec).namespace_id
                payload = numbers(spec)
                for number in range(puts):
                    chain = Chain.fresh(spec, CHAIN_BLOCKS, number)
                    done = client.put(namespace, PutBlocks(chain.keys, chain.parents, [payload] * CHAIN_BLOCKS))
                    if set(done.outcomes) != {Outcome.HIT}:
                        raise Unavailable(f"put {number} was not stored: {done.outcomes}")
                    host = host_of(daemon)
                    most = max(most, host.blocks)
                if not host.evicted:
                    raise Unavailable(f"HOST of {host_mib} MiB was never full")
    return most * spec.block_tokens


def numbers(spec: NamespaceSpec) -> bytes:
    """A raw block of normally distributed fp16; random bytes would hold NaN, which no codec takes."""
    count = spec.layers * spec.geometry.raw_bytes // 2
    return np.random.default_rng(1).standard_normal(count).astype(np.float16).tobytes()


def host_of(daemon: DaemonProcess) -> Any:
    """The line of HOST in ``kvctl status``."""
    return next(tier for tier in daemon.status().tiers if tier.tier == common_pb2.TIER_HOST)
