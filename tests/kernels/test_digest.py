"""Digests bound what they stand for: no token of a block scores above the bound, and the mean is the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.kernels import native
from kvstore.kernels.digest import bound_scores, digest_slices, exact_digests, outward
from kvstore.kernels.reference import read_memory, slice_values
from tests.kernels.cases import Case

SHAPES = [(1, 64, 64), (3, 80, 32), (2, 128, 64), (2, 2, 16), (1, 54, 18), (5, 256, 6)]


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "dim", "tokens"), SHAPES)
def test_every_token_scores_below_the_bound(codec: str, dtype: str, heads: int, dim: int, tokens: int) -> None:
    case = Case(heads, 3, dim, tokens, dtype, codec, contexts=(5 * tokens,), spread=20.0, seed=dim)
    _, batch = case.build()
    addresses = batch.addresses[0][batch.addresses[0] != 0].numpy()
    query = np.random.default_rng(1).standard_normal((3 * heads, dim), np.float32)
    for digests in (
        digest_slices(addresses, case.geometry, codec),
        outward(exact_digests(addresses, case.geometry, codec)).numpy(),
    ):
        most, middle = bound_scores(query, digests)
        assert most.shape == middle.shape == (5, 3 * heads)
        for block, address in enumerate(addresses.tolist()):
            keys, _ = slice_values(read_memory(address, case.geometry.slice_bytes(codec)), case.geometry, codec)
            scores = np.einsum("hgd,htd->hgt", query.reshape(heads, 3, dim).astype(np.float64), keys)
            scores = scores.reshape(3 * heads, tokens)
            # What fp32 sums of as many products may take.
            slack = 1e-6 * dim * np.abs(query).max() * np.abs(keys).max()
            assert (scores.max(-1) <= most[block] + slack).all()
            # A mean is kept to half of 2^-10 of itself.
            allowed = 2.0**-11 * (np.abs(query).sum(-1) * np.abs(keys).max()) + slack
            assert (np.abs(scores.mean(-1) - middle[block]) <= allowed).all()


@pytest.mark.parametrize("level", native.native_status().levels)
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "dim", "tokens"), SHAPES)
def test_every_level_makes_the_digests_of_the_reference(
    level: str, codec: str, dtype: str, heads: int, dim: int, tokens: int
) -> None:
    case = Case(heads, 1, dim, tokens, dtype, codec, contexts=(70 * tokens,), spread=5.0, seed=tokens)
    _, batch = case.build()
    addresses = batch.addresses[0][batch.addresses[0] != 0].numpy()
    expected = outward(exact_digests(addresses, case.geometry, codec)).float().numpy()
    found = np.full((len(addresses), 3, heads, dim), np.nan, np.float16)
    native.digest_slices(addresses, case.geometry, codec, found, level)
    # The last bit of fp16: sums and products come in another order.
    np.testing.assert_allclose(
        found.astype(np.float32), expected, rtol=2.0**-10, atol=1e-6 * tokens * np.abs(expected).max()
    )


@pytest.mark.parametrize("level", native.native_status().levels)
@pytest.mark.parametrize(
    ("heads", "group", "dim", "blocks"), [(1, 1, 64, 1), (3, 3, 64, 1030), (2, 7, 80, 65), (1, 4, 5, 3), (4, 8, 256, 9)]
)
def test_every_level_scores_as_the_reference(level: str, heads: int, group: int, dim: int, blocks: int) -> None:
    random = np.random.default_rng(dim)
    digests = random.standard_normal((blocks, 3, heads, dim)).astype(np.float16)
    query = random.standard_normal((heads * group, dim)).astype(np.float32)
    exact, grouped = digests.astype(np.float64), query.reshape(heads, group, dim).astype(np.float64)
    most = np.einsum("hgd,bhd->bhg", np.maximum(grouped, 0), exact[:, 1]) + np.einsum(
        "hgd,bhd->bhg", np.minimum(grouped, 0), exact[:, 0]
    )
    middle = np.einsum("hgd,bhd->bhg", grouped, exact[:, 2])
    found = np.full((2, blocks, heads * group), np.nan, np.float32)
    native.digest_scores(query, digests, (found[0], found[1]), level)
    # Products of numbers of some units, summed over the channels in fp32.
    allowed = dim * 2.0**-23 * np.abs(query).max() * np.abs(exact).max() * 2
    for got, wanted in zip(found, (most, middle), strict=True):
        assert np.abs(got - wanted.reshape(blocks, -1)).max() <= allowed


def test_without_native_code_scores_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    digests = random.standard_normal((40, 3, 2, 64)).astype(np.float16)
    query = random.standard_normal((6, 64)).astype(np.float32)
    here = bound_scores(query, digests)
    monkeypatch.setattr(native, "available", lambda: False)
    for got, wanted in zip(here, bound_scores(query, digests), strict=True):
        np.testing.assert_allclose(got, wanted, atol=64 * 2.0**-23 * 20)


def test_a_digest_in_half_the_memory_lies_outside_of_the_exact_one() -> None:
    values = torch.tensor([0.0, 1e-9, 1.0001, -3.3337, 70000.0, -1e6]).expand(3, 6).clone()[None, :, None]
    low, high, _ = outward(values).float().unbind(1)
    inside = values[:, 0].abs() < 65504
    assert ((low <= values[:, 0]) | ~inside).all()
    assert ((high >= values[:, 1]) | ~inside).all()
