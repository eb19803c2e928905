"""Digests bound what they stand for: no token of a block scores above the bound, and the mean is the mean."""

from __future__ import annotations

import pytest
import torch

from kvstore.engine.selection import outward
from kvstore.kernels.digest import bound_scores, digest_slices
from kvstore.kernels.reference import read_memory, slice_values
from tests.kernels.cases import Case


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(1, 64, 64), (3, 80, 32), (2, 128, 64)])
def test_every_token_scores_below_the_bound(codec: str, heads: int, dim: int, tokens: int) -> None:
    case = Case(heads, 3, dim, tokens, "float16", codec, contexts=(5 * tokens,), spread=20.0, seed=dim)
    _, batch = case.build()
    addresses = [address for address in batch.addresses[0].tolist() if address]
    exact = digest_slices(addresses, case.geometry, codec)
    query = torch.randn(3 * heads, dim, generator=torch.Generator().manual_seed(1))
    for digests in (exact, outward(exact)):
        most, middle = bound_scores(query, digests)
        assert most.shape == middle.shape == (5, 3 * heads)
        for block, address in enumerate(addresses):
            keys, _ = slice_values(read_memory(address, case.geometry.slice_bytes(codec)), case.geometry, codec)
            scores = torch.einsum("hgd,htd->hgt", query.view(heads, 3, dim).double(), torch.from_numpy(keys))
            scores = scores.reshape(3 * heads, tokens)
            assert (scores.amax(-1) <= most[block] * (1 + 1e-5 * most[block].sign()) + 1e-4).all()
            torch.testing.assert_close(scores.mean(-1).float(), middle[block], rtol=2e-2, atol=0.05)


def test_a_digest_in_half_the_memory_lies_outside_of_the_exact_one() -> None:
    values = torch.tensor([0.0, 1e-9, 1.0001, -3.3337, 70000.0, -1e6]).expand(3, 6).clone()[None, :, None]
    low, high, _ = outward(values).float().unbind(1)
    inside = values[:, 0].abs() < 65504
    assert ((low <= values[:, 0]) | ~inside).all()
    assert ((high >= values[:, 1]) | ~inside).all()
