"""Paged attention against float64, over shapes that models have and shapes that only tests have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.kernels import attention_torch, native
from kvstore.kernels.attention import merge, paged_attention
from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial
from kvstore.kernels.quant_reference import quantise_slice
from kvstore.kernels.reference import ReferencePartial, merge_reference, paged_attention_reference
from tests.kernels.cases import Case, plain_options

TOLERANCE = {"float32": 1e-5, "float16": 2e-4, "bfloat16": 2e-4, "int8": 2e-4}
"""Relative to the largest value of the answer. Both sides read the same stored values: only arithmetic differs."""


def error(found: torch.Tensor, wanted: np.ndarray) -> float:
    scale = max(float(np.abs(wanted).max()), 1e-3)
    return float(np.abs(found.double().numpy() - wanted).max()) / scale


def check(found: Partial, wanted: ReferencePartial, tolerance: float) -> None:
    empty = np.isneginf(wanted.lse)
    assert (np.isneginf(found.lse.numpy()) == empty).all()
    assert (found.out.numpy()[empty] == 0).all()
    assert error(found.out, wanted.out) <= tolerance
    assert np.abs(found.lse.numpy()[~empty] - wanted.lse[~empty]).max(initial=0.0) <= 10 * tolerance


Attend = Callable[[torch.Tensor, PagedBatch, AttentionOptions, int], Partial]


def cpu_forms() -> dict[str, Attend]:
    """The torch path, every C++ level that this machine runs, and whatever the dispatcher picks."""
    forms: dict[str, Attend] = {
        "dispatched": lambda query, batch, options, layer: paged_attention(query, batch, options, layer=layer),
        "torch": lambda query, batch, options, layer: attention_torch.paged_attention(
            query, batch, options, layer=layer
        ),
    }
    for level in native.native_status().levels:

        def attend(query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, layer: int, level: str = level):  # type: ignore[no-untyped-def]
            return native.paged_attention(query, batch, options, layer=layer, level=level)

        forms[level] = attend
    return forms


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Let torch fill every fresh tensor with NaN, so that a row that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(case: Case, options: AttentionOptions, layer: int = 1) -> None:
    query, batch = case.build()
    wanted = paged_attention_reference(query, batch, options, layer=layer)
    for name, attend in cpu_forms().items():
        found = attend(query, batch, options, layer)
        try:
            check(found, wanted, TOLERANCE["int8" if case.codec == "int8" else case.dtype])
        except AssertionError as error:
            raise AssertionError(f"form {name}: {error}") from error


FORMS = [("float32", "raw"), ("float16", "raw"), ("bfloat16", "raw"), ("float16", "int8"), ("bfloat16", "int8")]


@pytest.mark.parametrize(("dtype", "codec"), FORMS)
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 112, 128, 256])
def test_decode_agrees_for_every_head_size(dtype: str, codec: str, head_dim: int) -> None:
    case = Case(2, 3, head_dim, dtype=dtype, codec=codec, contexts=(1, 64, 200), queries=(1, 1, 1), seed=head_dim)
    run(case, plain_options(head_dim))


@pytest.mark.parametrize(("dtype", "codec"), FORMS)
@pytest.mark.parametrize("changes", [{}, {"window": 50}, {"soft_cap": 2.0}, {"window": 70, "soft_cap": 1.5}])
def test_prefill_masks_by_position(dtype: str, codec: str, changes: dict[str, object]) -> None:
    case = Case(1, 2, 48, dtype=dtype, codec=codec, contexts=(150, 37, 130), queries=(90, 37, 1), seed=3)
    run(case, plain_options(48, **changes))


@st.composite
def geometries(draw: st.DrawFn, elements_max: int) -> tuple[Case, dict[str, object], int]:
    """Draw a case, options and a layer: each side over its whole range, at most ``elements_max`` elements of K in all.

    1-64 query heads in groups of 1-8, heads of 32-256, contexts of 1-10,000, tables in random order with holes, windows
    and soft caps; where all of a row's blocks are left out, or its window holds none, the row is fully masked.
    """
    dtype, codec = draw(st.sampled_from(FORMS))
    head_dim = 2 * draw(st.integers(16, 128)) if codec == "int8" else draw(st.integers(32, 256))
    group = draw(st.integers(1, 8))
    heads = draw(st.integers(1, max(1, min(64 // group, elements_max // (512 * head_dim)))))
    longest = min(10_000, elements_max // (heads * head_dim))
    sizes = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    contexts = tuple(max(1, size // len(sizes)) for size in sizes)
    case = Case(
        kv_heads=heads,
        group=group,
        head_dim=head_dim,
        block_tokens=draw(st.sampled_from([16, 32, 64, 64, 64, 128])),
        dtype=dtype,
        codec=codec,
        contexts=contexts,
        queries=tuple(draw(st.integers(1, min(context, 5))) for context in contexts),
        keep=draw(st.sampled_from([1.0, 0.6, 0.2, 0.0])),
        distinct=6,
        seed=draw(st.integers(0, 1 << 32)),
    )
    window = draw(st.none() | st.integers(1, max(contexts)))
    soft_cap = draw(st.none() | st.floats(0.5, 30.0))
    return case, {"window": window, "soft_cap": soft_cap}, draw(st.integers(0, 1))


GEOMETRY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(GEOMETRY, max_examples=30, derandomize=True)
@given(geometries(1 << 20))
def test_random_geometry(drawn: tuple[Case, dict[str, object], int]) -> None:
    case, options, layer = drawn
    run(case, plain_options(case.head_dim, **options), layer=layer)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(GEOMETRY, max_examples=300)
@given(geometries(1 << 23))
def test_random_geometry_at_length(drawn: tuple[Case, dict[str, object], int]) -> None:
    """Other cases each time; ``--hypothesis-seed`` repeats them."""
    case, options, layer = drawn
    run(case, plain_options(case.head_dim, **options), layer=layer)


@pytest.mark.parametrize("spread", [4.0, 12.0, 40.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_wide_channels_in_keys_do_not_coarsen_int8(head_dim: int, spread: float) -> None:
    """Then q times the scales of K spans so much that 16 bits of it alone would not do."""
    for seed, tokens in enumerate((32, 64, 128)):
        contexts = (900, 64, 200)
        case = Case(
            2, 4, head_dim, tokens, codec="int8", contexts=contexts, queries=(1, 1, 2), spread=spread, seed=seed
        )
        run(case, plain_options(head_dim))


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("queries", [1, 20])
def test_long_context(codec: str, queries: int) -> None:
    case = Case(1, 2, 64, codec=codec, contexts=(10_000,), queries=(queries,), layers=1)
    run(case, plain_options(64), layer=0)


def test_rows_that_see_nothing_are_empty() -> None:
    query, batch = Case(contexts=(130, 5), queries=(1, 1)).build()
    batch.addresses[0] = 0
    found = paged_attention(query, batch, plain_options(64), layer=0)
    assert (found.out[0] == 0).all()
    assert torch.isneginf(found.lse[0]).all()
    assert torch.isfinite(found.lse[1]).all()


def test_merge_of_any_split_with_sinks_equals_the_whole() -> None:
    case = Case(2, 4, 64, dtype="float32", contexts=(500, 90), queries=(2, 1))
    query, batch = case.build()
    sinks = torch.linspace(-2, 3, 8)
    options = plain_options(64, sinks=sinks)
    whole = paged_attention_reference(query, batch, options, layer=0)
    wanted = merge_reference([whole], sinks.double().numpy())
    owner = torch.arange(batch.addresses.numel()).view(batch.addresses.shape) % 3
    parts = []
    for index in range(3):
        some = torch.where(owner == index, batch.addresses, 0)
        subset = PagedBatch(some, batch.starts, batch.query_offsets, batch.context_lens, batch.geometry)
        parts.append(paged_attention(query, subset, options, layer=0))
    check(merge(parts, sinks=sinks), wanted, TOLERANCE["float32"])
    check(attention_torch.merge(parts, sinks), wanted, TOLERANCE["float32"])


def test_merge_keeps_empty_rows_empty() -> None:
    empty = Partial(torch.zeros(2, 3, 8), torch.full((2, 3), -torch.inf))
    joined = merge([empty, empty])
    assert (joined.out == 0).all()
    assert torch.isneginf(joined.lse).all()
    with_sinks = merge([empty], sinks=torch.tensor([1.0, 2.0, 3.0]))
    assert (with_sinks.out == 0).all()
    assert with_sinks.lse.tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("join", [merge, lambda parts: attention_torch.merge(parts, None)])
def test_merge_survives_large_scores(join: Callable[[list[Partial]], Partial]) -> None:
    parts = [Partial(torch.full((1, 1, 4), float(i)), torch.tensor([[lse]])) for i, lse in enumerate((9e4, -9e4))]
    assert join(parts).out.tolist() == [[[0, 0, 0, 0]]]
    assert join(parts).lse.item() == pytest.approx(9e4)


def test_many_heads_and_splits_on_two_threads() -> None:
    """Long enough that the work is cut into runs, on a pool that is larger than one."""
    if native.available():
        before = native.thread_count()
        native.set_thread_count(2)
    for codec in ("raw", "int8"):
        case = Case(8, 4, 64, codec=codec, contexts=(3000, 1, 700), queries=(1, 1, 3), layers=1)
        run(case, plain_options(64, window=2500), layer=0)
    if native.available():
        native.set_thread_count(before)


def test_large_scores_do_not_overflow() -> None:
    case = Case(1, 2, 64, dtype="float32", contexts=(300,))
    query, batch = case.build()
    options = plain_options(64)
    wanted = paged_attention_reference(query * 300, batch, options, layer=0)
    for attend in cpu_forms().values():
        check(attend(query * 300, batch, options, 0), wanted, 2e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("addresses", torch.zeros(1, 3, dtype=torch.int32)),
        ("addresses", torch.zeros(3, dtype=torch.int64)),
        ("starts", torch.zeros(1, 2, dtype=torch.int32)),
        ("query_offsets", torch.tensor([0, 2], dtype=torch.int32)),
        ("query_offsets", torch.tensor([1, 1], dtype=torch.int32)),
        ("context_lens", torch.tensor([1, 1], dtype=torch.int32)),
    ],
)
def test_bad_tables_are_named(field: str, value: torch.Tensor) -> None:
    query, batch = Case().build()
    fields = {name: getattr(batch, name) for name in PagedBatch.__slots__} | {field: value}
    with pytest.raises(ValueError, match=field):
        paged_attention(query, PagedBatch(**fields), plain_options(64), layer=0)


@pytest.mark.parametrize(
    ("changes", "name"), [({"window": 0}, "window"), ({"soft_cap": 0.0}, "soft_cap"), ({"soft_cap": -1.0}, "soft_cap")]
)
def test_bad_options_are_named(changes: dict[str, object], name: str) -> None:
    query, batch = Case().build()
    with pytest.raises(ValueError, match=name):
        paged_attention(query, batch, plain_options(64, **changes), layer=0)


def test_bad_queries_are_named() -> None:
    query, batch = Case().build()
    for bad in (query[:, :3], query[..., :32], query.double(), query[0]):
        with pytest.raises(ValueError, match="query"):
            paged_attention(bad, batch, plain_options(64), layer=0)
    with pytest.raises(ValueError, match="layer"):
        paged_attention(query, batch, plain_options(64), layer=-1)
    two = Partial(torch.zeros(2, 4, 64), torch.zeros(2, 4))
    one = Partial(torch.zeros(1, 4, 64), torch.zeros(1, 4))
    for parts, sinks in (([], None), ([one, two], None), ([one], torch.zeros(3))):
        with pytest.raises(ValueError, match=r"partials|sinks"):
            merge(parts, sinks)


def _int8_error(outliers: bool, attend: Attend) -> float:
    """Root mean square distance of int8 attention from float64 attention over the values before the codec."""
    case = Case(2, 4, 64, dtype="float32", contexts=(1000,), queries=(4,), layers=1)
    query, batch = case.build()
    geometry = case.geometry
    coded = []
    for memory in case.memory:
        raw = memory[int(-memory.ctypes.data % 64) :][: geometry.raw_bytes]
        keys = raw.view(np.float32).reshape(2, 2, -1)[:, 0].reshape(2, 64, 64)
        np.nan_to_num(raw.view(np.float32), copy=False)
        if outliers:
            keys[:, ::9] += 12
        data = quantise_slice(raw, geometry)
        assert data is not None
        coded.append(data)
    wanted = paged_attention_reference(query, batch, plain_options(64), layer=0)
    moved = {
        memory.ctypes.data + int(-memory.ctypes.data % 64): data
        for memory, data in zip(case.memory, coded, strict=True)
    }
    table = batch.addresses.clone().apply_(lambda address: moved[address].ctypes.data if address else 0)
    fields = {name: getattr(batch, name) for name in PagedBatch.__slots__} | {"addresses": table, "codec": "int8"}
    found = attend(query, PagedBatch(**fields), plain_options(64), 0)
    return float(np.sqrt(np.mean((found.out.double().numpy() - wanted.out) ** 2)))


def test_outlier_channels_in_keys_do_not_hurt_int8_attention() -> None:
    """Real keys have a few channels with a large mean; 12 sigma here."""
    for name, attend in cpu_forms().items():
        plain, spiky = _int8_error(False, attend), _int8_error(True, attend)
        assert plain < 2e-3, name
        assert spiky <= 1.5 * plain, name
