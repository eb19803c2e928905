"""The figures of coded chunks: shares and rates of blocks that went over TCP; how fast is not a test."""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from kvstore.kernels.layout import SliceGeometry
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.slow_link import slow_link
from kvstore.tools.kvbench.wire import LINKS, WireBlocks, run_slow_wire, run_wire

GEOMETRY = SliceGeometry(2, 32, 64, "bfloat16")
LAYERS, BLOCKS = 3, 2


@pytest.fixture(scope="module")
def daemon():
    with TemporaryDirectory(prefix="kv-") as folder:
        flags = {"host": "16 MiB", "device": "0", "listen": "127.0.0.1:0"}
        with DaemonProcess(Path(folder), flags) as made:
            made.start()
            yield made


def slices_of(high: int) -> np.ndarray:
    """Noise, with ``high`` values of the high byte: 1 is numbers of one exponent."""
    draw = np.random.default_rng(1)
    shape = (LAYERS * BLOCKS, GEOMETRY.raw_bytes)
    data = draw.integers(0, 256, shape, np.uint8)
    data[:, 1::2] = draw.integers(0, high, (shape[0], shape[1] // 2), np.uint8)
    return data


def test_payloads_are_layer_by_layer_of_one_block():
    slices = slices_of(256)
    blocks = WireBlocks.of(slices, GEOMETRY, "bfloat16", BLOCKS)
    assert blocks.spec.layers == LAYERS
    wanted = [b"".join(slices[layer * BLOCKS + block].tobytes() for layer in range(LAYERS)) for block in range(BLOCKS)]
    assert [bytes(payload) for payload in blocks.payloads] == wanted
    assert blocks.nbytes == slices.nbytes


def test_one_exponent_saves_half_and_noise_nothing(daemon):
    for high, least, most in ((1, 48, 50), (256, 0, 0)):
        blocks = WireBlocks.of(slices_of(high), GEOMETRY, "bfloat16", BLOCKS)
        rows = {row.case: row for row in run_wire(daemon, blocks, 2, {"text": "none"})}
        assert least <= rows["wire bf16, bytes saved"].value <= most
        for case in ("write plain", "read plain", "write coded", "read coded"):
            assert rows[f"wire bf16, {case}"].value > 0
        assert {row.conditions["block_bytes"] for row in rows.values()} == {LAYERS * GEOMETRY.raw_bytes}


def test_links_are_rows_of_their_own(daemon):
    rows = run_slow_wire(daemon, WireBlocks.of(slices_of(1), GEOMETRY, "bfloat16", BLOCKS), 1, {})
    assert [row.conditions["link"] for row in rows] == [f"{mbit_s} Mbit/s" for mbit_s in LINKS for _ in range(4)]
    assert rows[0].case == f"wire bf16, write plain at {LINKS[0]} Mbit/s"


def test_a_slow_link_carries_every_byte_both_ways():
    data = np.random.default_rng(3).bytes(300_000)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        slow_link(server.getsockname()[1], 1000.0) as port,
        socket.create_connection(("127.0.0.1", port)) as near,
    ):
        far, _ = server.accept()
        with far:
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
            assert read_all(far) == data
            far.sendall(data[::-1])
            far.shutdown(socket.SHUT_WR)
            assert read_all(near) == data[::-1]


def read_all(connection):
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)
