"""Block copies in the interpreter; run by ``test_triton`` in a process of its own."""

from __future__ import annotations

import pytest
import torch

from kvstore.kernels.triton_launch import interpreted
from kvstore.kernels.triton_move import copy_blocks, gather_blocks, scatter_blocks


def arena(blocks: int, size: int) -> torch.Tensor:
    """Random bytes [blocks, size] at a multiple of 64; torch aligns its memory so."""
    return torch.randint(0, 256, (blocks, size), dtype=torch.uint8)


def addresses(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.tensor([rows[index].data_ptr() for index in order], dtype=torch.int64)


@pytest.mark.parametrize("size", [16, 512, 16384, 16400, 40960])
def test_gather_and_scatter(size: int) -> None:
    assert interpreted()
    source, target = arena(5, size), torch.zeros(3, size, dtype=torch.uint8)
    gather_blocks(addresses(source, [4, 0, 2]), target)
    assert torch.equal(target, source[[4, 0, 2]])
    back = torch.zeros(5, size, dtype=torch.uint8)
    scatter_blocks(target, addresses(back, [4, 0, 2]))
    assert torch.equal(back[[4, 0, 2]], source[[4, 0, 2]])
    assert not back[[1, 3]].any()


def test_bytes_after_the_block_and_pairs_with_zero_are_left_alone() -> None:
    source, target = arena(3, 1024), torch.zeros(3, 1024, dtype=torch.uint8)
    sources, targets = addresses(source, [0, 1, 2]), addresses(target, [0, 1, 2])
    sources[1], targets[2] = 0, 0
    copy_blocks(sources, targets, 512)
    assert torch.equal(target[0, :512], source[0, :512])
    assert not target[0, 512:].any()
    assert not target[1:].any()


def test_nothing_to_copy() -> None:
    copy_blocks(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 512)
    copy_blocks(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 0)


def test_bad_arguments() -> None:
    good = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="size is 24; it must be a multiple of 16"):
        copy_blocks(good, good, 24)
    with pytest.raises(ValueError, match=r"targets is torch\.int32"):
        copy_blocks(good, good.int(), 16)
    with pytest.raises(ValueError, match=r"targets is torch\.int64"):
        copy_blocks(good, good[:1], 16)
    with pytest.raises(ValueError, match="contiguous uint8"):
        gather_blocks(good, torch.zeros(2, 32, dtype=torch.uint8)[:, ::2])
