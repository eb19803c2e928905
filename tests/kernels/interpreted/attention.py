"""Triton paged attention in the interpreter against float64; run by ``test_triton`` in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl

from kvstore.kernels import triton_paged
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial
from kvstore.kernels.reference import ReferencePartial, paged_attention_reference
from kvstore.kernels.triton_attention import merge, paged_attention
from kvstore.kernels.triton_form import choose_form, choose_splits
from kvstore.kernels.triton_launch import interpreted
from tests.kernels.cases import Case, plain_options

TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3, "int8": 1e-5}
"""Relative to the answer's largest value: a few times the rounding of a weight to the dtype of the products; with int8,
whose weights and queries are split into two numbers, a few times that of fp32."""

FORMS = [
    ("float32", "raw"),
    ("float16", "raw"),
    ("bfloat16", "raw"),
    ("float16", "int8"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that whatever a kernel leaves unwritten is seen."""
    assert interpreted()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def check(found: Partial, wanted: ReferencePartial, tolerance: float) -> None:
    out, lse = found.out.double().numpy(), found.lse.double().numpy()
    empty = np.isneginf(wanted.lse)
    assert (np.isneginf(lse) == empty).all()
    assert (out[empty] == 0).all()
    assert np.abs(out - wanted.out).max() <= tolerance * max(float(np.abs(wanted.out).max()), 1e-3)
    assert np.abs(lse[~empty] - wanted.lse[~empty]).max(initial=0.0) <= tolerance


def run(case: Case, options: AttentionOptions, *, layer: int = 1, splits: int = 1) -> None:
    query, batch = case.build()
    found = paged_attention(query, batch, options, layer=layer, splits=splits)
    wanted = paged_attention_reference(query, batch, options, layer=layer)
    check(found, wanted, TOLERANCE["int8" if case.codec == "int8" else case.dtype])


@pytest.mark.parametrize(("dtype", "codec"), FORMS)
@pytest.mark.parametrize(
    "head_dim", [80, pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
)
def test_decode_agrees_for_every_form(dtype: str, codec: str, head_dim: int) -> None:
    case = Case(2, 3, head_dim, dtype=dtype, codec=codec, contexts=(1, 200), queries=(1, 1), seed=head_dim)
    run(case, plain_options(head_dim))


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize(
    "head_dim", [128, 256, pytest.param(96, marks=pytest.mark.slow), pytest.param(112, marks=pytest.mark.slow)]
)
def test_decode_agrees_for_large_heads(codec: str, head_dim: int) -> None:
    run(Case(1, 4, head_dim, codec=codec, contexts=(150,), seed=head_dim), plain_options(head_dim))


@pytest.mark.parametrize("spread", [1e-3, 30.0])
def test_keys_of_any_magnitude_do_not_coarsen_int8(spread: float) -> None:
    case = Case(1, 4, 64, dtype="bfloat16", codec="int8", contexts=(200, 64), queries=(1, 1), spread=spread)
    run(case, plain_options(64))


@pytest.mark.parametrize(("dtype", "codec"), FORMS)
@pytest.mark.parametrize(
    "changes", [{"window": 70, "soft_cap": 1.5}, pytest.param({"window": 50}, marks=pytest.mark.slow)]
)
def test_prefill_masks_by_position(dtype: str, codec: str, changes: dict[str, object]) -> None:
    case = Case(1, 2, 48, dtype=dtype, codec=codec, contexts=(100, 37, 130), queries=(20, 37, 1), seed=3)
    run(case, plain_options(48, **changes))


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("group", [1, 5, 20])
def test_groups_of_any_size(codec: str, group: int) -> None:
    run(Case(2, group, 32, codec=codec, contexts=(70, 33), queries=(1, 2), seed=group), plain_options(32))


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_block_sizes(codec: str, block_tokens: int) -> None:
    if (codec, block_tokens) == ("int8", 16):
        pytest.skip("the int8 kernel takes blocks of 32 tokens and more")
    case = Case(1, 2, 32, block_tokens=block_tokens, codec=codec, contexts=(150, 0), queries=(2, 1))
    run(case, plain_options(32, window=100))


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize(
    "splits", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_splits_do_not_change_the_answer(codec: str, splits: int) -> None:
    case = Case(1, 2, 32, codec=codec, contexts=(300, 40), queries=(1, 2), keep=0.8, seed=splits)
    run(case, plain_options(32), splits=splits)


def test_every_layer_is_found() -> None:
    for layer in range(3):
        run(Case(2, 2, 32, layers=3, contexts=(100,), seed=layer), plain_options(32), layer=layer)


def test_a_table_longer_than_one_scan() -> None:
    case = Case(1, 2, 32, contexts=(200, 100), queries=(1, 1))
    query, batch = case.build()
    wide = torch.zeros(2, 1100, dtype=torch.int64)
    starts = torch.full((2, 1100), 5, dtype=torch.int32)
    places = torch.tensor([1030, 1023, 1018, 1024, 1029])[: batch.addresses.shape[1]]
    wide[:, places], starts[:, places] = batch.addresses, batch.starts
    spread = replace(batch, addresses=wide, starts=starts)
    found = paged_attention(query, spread, plain_options(32), layer=1, splits=2)
    check(found, paged_attention_reference(query, batch, plain_options(32), layer=1), TOLERANCE["float16"])


def test_more_sequences_than_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "SEQUENCE_SCAN", tl.constexpr(8))
    contexts, queries = [0] * 10, [0] * 10
    for sequence in (0, 7, 8, 9):
        contexts[sequence], queries[sequence] = 1 + 5 * sequence, 1 + sequence % 3
    run(Case(1, 2, 32, contexts=tuple(contexts), queries=tuple(queries)), plain_options(32))


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_rows_that_see_nothing(block_tokens: int) -> None:
    query, batch = Case(2, 2, 32, block_tokens=block_tokens, contexts=(70, 70), queries=(2, 1)).build()
    nothing = replace(batch, addresses=torch.zeros_like(batch.addresses))
    for splits in (1, 3):
        found = paged_attention(query, nothing, plain_options(32), layer=0, splits=splits)
        assert (found.out == 0).all()
        assert (found.lse == -torch.inf).all()


def test_no_queries_at_all() -> None:
    query, batch = Case(1, 2, 32, contexts=(70,), queries=(0,)).build()
    found = paged_attention(query, batch, plain_options(32), layer=0)
    assert found.out.shape == (0, 2, 32)
    assert found.lse.shape == (0, 2)


def test_a_query_in_another_dtype_and_not_contiguous() -> None:
    case = Case(2, 2, 32, contexts=(100, 90), queries=(1, 1))
    query, batch = case.build()
    strided = query.float().transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    found = paged_attention(strided, batch, plain_options(32), layer=1)
    check(found, paged_attention_reference(query, batch, plain_options(32), layer=1), TOLERANCE["float16"])


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_random_geometry(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    dtype, codec = FORMS[seed % len(FORMS)]
    head_dim = int(rng.choice([16, 32, 40, 66, 72]))
    queries = tuple(int(count) for count in rng.integers(1, 6, 2))
    contexts = tuple(int(count) + int(rng.integers(0, 200)) for count in queries)
    case = Case(int(rng.integers(1, 3)), int(rng.integers(1, 9)), head_dim, dtype=dtype, codec=codec)
    case.contexts, case.queries, case.keep, case.seed = contexts, queries, float(rng.choice([1.0, 0.6])), seed
    changes = {"window": int(rng.integers(1, 150))} if rng.random() < 0.5 else {}
    run(case, plain_options(head_dim, **changes), splits=int(rng.integers(1, 3)))


def test_int8_survives_large_and_small_values() -> None:
    """Scales of V are taken relative to the tile's largest, so that no magnitude leaves fp16."""
    for factor in (5e3, 1e-3):
        case = Case(1, 2, 32, codec="int8", contexts=(128,), seed=1)
        query, batch = case.build()
        for block in case.memory:
            first = int(-block.ctypes.data % 64) + case.geometry.slice_stride("int8")
            scales = block[first : first + case.geometry.int8_bytes][-2 * 64 :].view(np.float16)
            scales *= np.float16(factor)
        wanted = paged_attention_reference(query, batch, plain_options(32), layer=1)
        assert np.abs(wanted.out).max() > 1000 or np.abs(wanted.out).max() < 0.01
        check(paged_attention(query, batch, plain_options(32), layer=1), wanted, TOLERANCE["int8"])


def test_geometry_that_the_kernel_does_not_take() -> None:
    cases = [
        (SliceGeometry(1, 64, 48, "float16"), "raw", "block_tokens is 48"),
        (SliceGeometry(1, 64, 16, "float16"), "int8", "block_tokens is 16"),
        (SliceGeometry(1, 257, 64, "float16"), "raw", "head_dim is 257"),
        (SliceGeometry(1, 8, 64, "float16"), "raw", "head_dim is 8"),
        (SliceGeometry(1, 256, 64, "float32"), "raw", "head_dim is 256"),
        (SliceGeometry(1, 33, 64, "float16"), "int8", "head_dim is 33"),
    ]
    for geometry, codec, message in cases:
        with pytest.raises(ValueError, match=message):
            choose_form(geometry, codec, 1, rows_a_sequence=1, window=False, soft_cap=False, backend="cuda")


def test_splits_fill_the_device() -> None:
    assert choose_splits(2048, 8, 132) >= 33
    assert choose_splits(2048, 8, 132) * 8 >= 2 * 132
    assert choose_splits(2048, 4096, 132) == 1
    assert choose_splits(3, 1, 132) == 1
    assert choose_splits(0, 0, 132) == 1
    assert choose_splits(1 << 20, 1, 132) == 256


def test_one_tile_takes_a_group() -> None:
    geometry = SliceGeometry(8, 128, 64, "float16")
    options = {"window": False, "soft_cap": False, "backend": "cuda"}
    assert choose_form(geometry, "raw", 8, rows_a_sequence=8, **options).form.block_m == 16
    assert choose_form(geometry, "raw", 8, rows_a_sequence=800, **options).form.block_m == 64
    assert choose_form(geometry, "int8", 8, rows_a_sequence=800, **options).form.block_m == 32


def test_placement_does_not_change_the_answer() -> None:
    """Blocks in one call, or dealt out to two calls and merged: the same."""
    query, batch = Case(2, 2, 32, contexts=(250, 130), queries=(1, 4)).build()
    parts = []
    for remainder in (0, 1):
        column = torch.arange(batch.addresses.shape[1]) % 2 == remainder
        part = replace(batch, addresses=torch.where(column, batch.addresses, 0))
        parts.append(paged_attention(query, part, plain_options(32), layer=1))
    wanted = paged_attention_reference(query, batch, plain_options(32), layer=1)
    check(merge(parts), wanted, TOLERANCE["float16"])


def test_an_empty_batch() -> None:
    none = torch.zeros(0, 1, dtype=torch.int64)
    batch = PagedBatch(
        none,
        none.int(),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        SliceGeometry(1, 32, 64, "float16"),
    )
    assert paged_attention(torch.zeros(0, 2, 32), batch, plain_options(32), layer=0).out.shape == (0, 2, 32)
