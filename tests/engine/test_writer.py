"""New K and V land where the layout says, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.engine.memory import PrivatePool, Region
from kvstore.engine.writer import KvWriter, WriteRun

HEADS, DIM, TOKENS, LAYERS = 2, 12, 16, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layout_of(dtype: str) -> tuple[NamespaceSpec, BlockLayout]:
    spec = NamespaceSpec(model="m", dtype=dtype, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS)
    return spec, BlockLayout.of(spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "runs",
    [
        [(0, 0, 0, 16)],
        [(1, 3, 0, 13), (2, 0, 13, 2)],
        [(0, 15, 0, 1), (1, 0, 1, 1), (2, 7, 2, 1)],
        [(2, 5, 0, 3), (0, 0, 3, 9), (1, 1, 12, 1)],
    ],
)
def test_every_token_lands_in_its_place_and_nothing_else_changes(
    dtype: str, runs: list[tuple[int, int, int, int]]
) -> None:
    spec, layout = layout_of(dtype)
    memory = np.full(3 * layout.device_bytes, 0xFF, np.uint8)
    region = Region(memoryview(memory), LAYERS)
    blocks = [block * layout.device_bytes for block, *_ in runs]
    plan = [WriteRun(region, offset, *rest) for offset, (_, *rest) in zip(blocks, runs, strict=True)]
    total = sum(run.count for run in plan)
    writer = KvWriter(plan, spec.geometry, layout.raw_slice_stride)
    expected = memory.copy()
    for layer in range(LAYERS):
        key = torch.randn(HEADS, total, DIM).to(DTYPES[dtype])
        value = torch.randn(HEADS, total, DIM).to(DTYPES[dtype])
        writer.write(layer, key, value)
        for run in plan:
            place_slowly(expected, run, layer * layout.raw_slice_stride, key, value)
    assert np.array_equal(memory, expected)


def test_a_model_that_computes_in_another_dtype_has_its_k_and_v_rounded() -> None:
    spec, layout = layout_of("float16")
    memories = []
    for numbers in (torch.float32, torch.float16):
        memory = np.zeros(layout.device_bytes, np.uint8)
        region = Region(memoryview(memory), LAYERS)
        # A run long enough to be copied as a piece, and one that is scattered.
        runs = [WriteRun(region, 0, 0, 0, 13), WriteRun(region, 0, 13, 13, 2)]
        generator = torch.Generator().manual_seed(6)
        key, value = (torch.randn(HEADS, 15, DIM, generator=generator).to(numbers) for _ in range(2))
        KvWriter(runs, spec.geometry, layout.raw_slice_stride).write(1, key, value)
        memories.append(memory)
    assert memories[0].any()
    assert np.array_equal(*memories)


def place_slowly(memory: np.ndarray, run: WriteRun, slice_offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """The layout's words, element by element: K [head_dim][tokens], then V [tokens][head_dim], head after head."""
    size = key.element_size()
    begin = run.offset + slice_offset
    for head in range(HEADS):
        for token in range(run.count):
            for channel in range(DIM):
                k_element = head * 2 * DIM * TOKENS + channel * TOKENS + run.start + token
                v_element = head * 2 * DIM * TOKENS + DIM * TOKENS + (run.start + token) * DIM + channel
                for element, source in ((k_element, key), (v_element, value)):
                    raw = source[head, run.row + token, channel].reshape(1).view(torch.uint8).numpy()
                    memory[begin + element * size : begin + (element + 1) * size] = raw


def test_the_pool_hands_out_each_piece_once_and_takes_it_back() -> None:
    _, layout = layout_of("float32")
    pool = PrivatePool(layout, 3 * layout.device_bytes + 1)
    taken = [pool.take() for _ in range(4)]
    assert taken == [0, layout.device_bytes, 2 * layout.device_bytes, None]
    pool.give_back(layout.device_bytes)
    assert pool.take() == layout.device_bytes
    for offset in taken[:3]:
        pool.give_back(offset or 0)
    assert pool.used_blocks == 0
    assert pool.take() == 0
