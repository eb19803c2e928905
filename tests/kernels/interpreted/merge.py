"""The Triton merge in the interpreter against float64; run by ``test_triton`` in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.kernels.paged import Partial
from kvstore.kernels.reference import ReferencePartial, merge_reference
from kvstore.kernels.triton_launch import interpreted
from kvstore.kernels.triton_merge import merge, merge_stacked


def draw(parts: int, queries: int, heads: int, dim: int, seed: int) -> list[Partial]:
    """Partials over a wide range of log-sum-exp; a third of them saw nothing and hold 0 and -inf."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(parts):
        lse = 30 * torch.randn(queries, heads, generator=generator)
        lse[torch.rand(queries, heads, generator=generator) < 0.33] = -torch.inf
        out = torch.randn(queries, heads, dim, generator=generator)
        found.append(Partial(torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, out), lse))
    return found


def check(found: Partial, partials: list[Partial], sinks: torch.Tensor | None) -> None:
    parts = [ReferencePartial(part.out.double().numpy(), part.lse.double().numpy()) for part in partials]
    wanted = merge_reference(parts, None if sinks is None else sinks.double().numpy())
    np.testing.assert_allclose(found.out.numpy(), wanted.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.lse.numpy(), wanted.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("parts", "dim"), [(1, 64), (2, 40), (3, 96), (16, 32), (17, 32), (40, 33)])
def test_merge_agrees(parts: int, dim: int, with_sinks: bool) -> None:
    assert interpreted()
    partials = draw(parts, 3, 2, dim, seed=parts)
    sinks = torch.tensor([0.5, -torch.inf]) if with_sinks else None
    check(merge(partials, sinks), partials, sinks)


def test_values_of_an_empty_part_are_not_read() -> None:
    partials = draw(3, 2, 2, 32, seed=1)
    wanted = merge(partials)
    for part in partials:
        part.out[part.lse == -torch.inf] = torch.nan
    torch.testing.assert_close(merge(partials).out, wanted.out)


def test_only_sinks() -> None:
    nothing = [Partial(torch.zeros(2, 3, 32), torch.full((2, 3), -torch.inf))] * 2
    merged = merge(nothing, torch.tensor([1.0, 2.0, 3.0]))
    assert (merged.out == 0).all()
    torch.testing.assert_close(merged.lse, torch.tensor([1.0, 2.0, 3.0]).expand(2, 3))


def test_no_queries() -> None:
    merged = merge_stacked(torch.zeros(4, 0, 2, 32), torch.zeros(4, 0, 2))
    assert merged.out.shape == (0, 2, 32)
