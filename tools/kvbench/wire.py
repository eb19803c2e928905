"""What coded chunks save a remote client, and what they cost: real K and V through a daemon over TCP on this machine.

Loopback is as fast a network as there is, so its times are those of the work. Links of a real network's speed say where
fewer bytes are worth it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client, ClientOptions, PutBlocks, aligned_buffer
from kvstore.core.errors import Unavailable
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import BlockKey, NamespaceId, Outcome
from kvstore.kernels.layout import SliceGeometry
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.rows import Row, median, rate, take_turns
from kvstore.tools.kvbench.slow_link import slow_link

LZ4: Final = NamespacePolicy(lossless="lz4")
LINKS: Final = (100, 500, 1000)
"""Mbit/s of the links that stand for networks."""
SHORT: Final = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class WireBlocks:
    """A chain of raw blocks of one model, as payloads of put."""

    spec: NamespaceSpec
    payloads: list[NDArray[np.uint8]]

    @classmethod
    def of(cls, slices: NDArray[np.uint8], geometry: SliceGeometry, dtype: str, blocks: int) -> Self:
        """``slices`` are [slices, bytes], layer by layer, and in a layer block by block."""
        layers = len(slices) // blocks
        spec = NamespaceSpec(
            model="kvbench-wire",
            dtype=dtype,
            layers=layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            block_tokens=geometry.block_tokens,
            # What a run before this one has left in the daemon would not be sent again.
            salt=secrets.token_bytes(8),
        )
        by_block = slices.reshape(layers, blocks, -1).transpose(1, 0, 2)
        return cls(spec, [np.ascontiguousarray(block).reshape(-1) for block in by_block])

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(payload.nbytes for payload in self.payloads)

    def keys(self, namespace_id: NamespaceId, turn: int) -> list[BlockKey]:
        """Keys of a chain that no other turn has."""
        tokens = self.spec.block_tokens
        count = len(self.payloads) * tokens
        return chain_keys(namespace_id, range(turn * count, (turn + 1) * count), tokens)


def run_wire(daemon: DaemonProcess, blocks: WireBlocks, rounds: int, conditions: dict[str, Any]) -> list[Row]:
    """Bytes on the wire, and time of put and get over loopback. Unavailable if the daemon loses blocks."""
    before = daemon.status().counters
    rows, seconds = _measure(daemon.tcp_port, blocks, rounds, conditions)
    after = daemon.status().counters
    saved = after["wire_read_saved_bytes"] - before["wire_read_saved_bytes"]
    share = saved / len(seconds["read coded"]) / blocks.nbytes
    return [replace(rows[0], case=f"wire {_short(blocks)}, bytes saved", value=100 * share, unit="%"), *rows]


def run_slow_wire(daemon: DaemonProcess, blocks: WireBlocks, rounds: int, conditions: dict[str, Any]) -> list[Row]:
    """The same times over links of ``LINKS``: there plain bytes wait for the link, and coded ones for the coding."""
    rows = []
    for mbit_s in LINKS:
        with slow_link(daemon.tcp_port, mbit_s) as port:
            rows += _measure(port, blocks, rounds, conditions | {"link": f"{mbit_s} Mbit/s"})[0]
    return rows


def _measure(
    port: int, blocks: WireBlocks, rounds: int, conditions: dict[str, Any]
) -> tuple[list[Row], dict[str, list[float]]]:
    """A row for each case, and the seconds of each round: the uncounted first ones are put and read like the others."""
    with _turns(port, blocks, lossless=False) as plain, _turns(port, blocks, lossless=True) as coded:
        # Get reads what the put of the same turn wrote.
        cases = {"write plain": plain.put, "write coded": coded.put, "read plain": plain.get, "read coded": coded.get}
        seconds = take_turns(cases, rounds, warm_up=0)
    conditions = conditions | {"blocks": len(blocks.payloads), "block_bytes": blocks.payloads[0].nbytes}
    link = f" at {conditions['link']}" if "link" in conditions else ""
    rows = [
        Row(
            bench="codec",
            case=f"wire {_short(blocks)}, {case}{link}",
            value=rate(blocks.nbytes, median(taken)),
            unit="MB/s",
            conditions=conditions,
        )
        for case, taken in seconds.items()
    ]
    return rows, seconds


def _short(blocks: WireBlocks) -> str:
    return SHORT.get(blocks.spec.dtype, blocks.spec.dtype)


class _Turn:
    """Puts and gets of one client; each turn has keys of its own, since what is resident is not sent again."""

    def __init__(self, client: Client, blocks: WireBlocks) -> None:
        self._client = client
        self._blocks = blocks
        self._namespace = client.open_namespace(blocks.spec, policy=LZ4).namespace_id
        self._numbers = itertools.count(int(client.options.lossless), 2)
        self._keys: list[BlockKey] = []
        self._out = aligned_buffer(blocks.nbytes)

    def put(self) -> None:
        self._keys = self._blocks.keys(self._namespace, next(self._numbers))
        done = self._client.put(self._namespace, PutBlocks(self._keys, parents_of(self._keys), self._blocks.payloads))
        if set(done.outcomes) != {Outcome.HIT}:
            raise Unavailable(f"HOST is too small for this bench: it needs {4 * self._blocks.nbytes >> 20} MiB")

    def get(self) -> None:
        got = self._client.get(self._namespace, self._keys, out=self._out)
        if set(got.outcomes) != {Outcome.HIT}:
            raise Unavailable("blocks that were just put are not there")


@contextmanager
def _turns(port: int, blocks: WireBlocks, *, lossless: bool) -> Iterator[_Turn]:
    options = ClientOptions(name="kvbench", strict=True, lossless=lossless)
    with Client(f"grpc://127.0.0.1:{port}", options) as client:
        yield _Turn(client, blocks)
