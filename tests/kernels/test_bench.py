"""The benches of attention say what they promise, on shapes too small to say how fast anything is."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.kernels import bench, bench_attention, bench_torch, native
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.paged import AttentionOptions

pytestmark = pytest.mark.skipif(not native.available(), reason="the C++ kernels are not built here")

TINY = bench.Model("tiny", 4, 2, 32)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "SHAPES", ((1, 4096), (2, 256)))
    monkeypatch.setattr(bench_attention, "LONG_SHAPE", (1, 8192))
    monkeypatch.setattr(bench_attention, "BANDWIDTH_BYTES", 4 << 20)
    monkeypatch.setattr(bench_attention, "LLAMA_8B", TINY)
    monkeypatch.setattr(bench_attention, "SMOLLM2", bench.Model("tinier", 3, 1, 32))


def rows_of(**changes: Any) -> list[bench.Row]:
    return list(bench_attention.attention_rows(**({"threads": (1, 2), "repeats": 1} | changes)))


def test_each_case_has_its_time_its_speed_ups_and_what_memory_allows(small: None) -> None:
    before = native.thread_count(), torch.get_num_threads()
    rows = rows_of()
    assert (native.thread_count(), torch.get_num_threads()) == before
    cases = {row["case"]: row for row in rows}
    assert len(cases) == len(rows) == 2 * 3 * 2 * (3 + 4)
    fp16, int8 = cases["decode tiny 1 x 8192 fp16 2 threads"], cases["decode tiny 1 x 8192 int8 2 threads"]
    assert (fp16["target"], int8["target"]) == (">= 0.6 of it", ">= 0.45 of it")
    assert int8["peers"] == {}
    over = {case: row for case, row in cases.items() if case.startswith(f"{fp16['case']}, over")}
    assert len(over) == 2
    for case, row in over.items():
        route = case.split(", over ")[1]
        assert row["value"] == pytest.approx(fp16["peers"][route] / fp16["value"], rel=0.02)
        assert row["limit"] == pytest.approx(fp16["peers"][route] / fp16["limit"], rel=0.02)
    joined = [name for name in fp16["peers"] if name.endswith("contiguous")]
    best = min(joined, key=lambda name: fp16["peers"][name])
    assert f"{fp16['case']}, over {best}" in over
    ratio = cases[f"{int8['case']}, time over that of fp16"]
    assert ratio["value"] == pytest.approx(int8["value"] / fp16["value"], rel=0.02)


def test_one_level_can_be_forced(small: None) -> None:
    rows = rows_of(long=False, threads=(1,), level="portable")
    assert {(row["bench"], row["conditions"]["level"]) for row in rows} == {("attention portable", "portable")}
    with pytest.raises(ValueError, match="neon9"):
        rows_of(level="neon9")


def test_the_long_rows_are_left_out_where_memory_is_short(
    small: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench_attention, "_available_bytes", lambda: 1 << 30)
    with caplog.at_level(logging.WARNING):
        rows = rows_of(threads=(1,))
    assert not any("8192" in row["case"] for row in rows)
    assert "8 GiB" in caplog.text


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_blocks_of_a_case_are_apart_and_finite(codec: str) -> None:
    data = bench.memory(1 << 20)
    query, batch = bench_attention.decode_case(TINY, (2, 256), codec, data)
    assert batch.addresses.unique().numel() == 8
    assert torch.isfinite(paged_attention(query, batch, AttentionOptions(scale=0.2), layer=0).out).all()


def test_torch_s_paged_route_attends_to_the_blocks_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged over chunks in random order it equals one op over all, since attention knows no order."""
    monkeypatch.setattr(bench_torch, "CHUNK_BLOCKS", 3)
    flat = torch.randn(2 * 8 * 64 * TINY.kv_heads * TINY.head_dim)
    query = torch.randn(1, TINY.kv_heads, 2, TINY.head_dim)
    (found,) = bench_torch._paged(query, flat, TINY, (1, 512))()  # type: ignore[misc]
    key, value = flat.view(2, 1, 512, TINY.kv_heads, TINY.head_dim).transpose(2, 3)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_reading_blocks_sums_each_one_s_words() -> None:
    data = np.arange(3 * 70, dtype=np.uint64)
    addresses = torch.tensor([data.ctypes.data + index * 560 for index in (2, 0)])
    assert native.read_blocks(addresses, 555) == int(data[140:209].sum() + data[:69].sum())
    assert native.read_blocks(addresses[:0], 8) == 0
