"""The extension as a whole: its status, its pool of threads, and copies with their checksum."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from kvstore.kernels import native, quant
from kvstore.kernels.attention import merge, paged_attention
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import Partial
from kvstore.kernels.quant_reference import quantise_slice
from tests.kernels.cases import Case, plain_options

needs_native = pytest.mark.skipif(not native.available(), reason="the C++ kernels are not built here")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = native.thread_count()
    native.set_thread_count(2)
    yield
    native.set_thread_count(before)


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine where the extension can not be imported."""
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> object:
        if name == "kvstore.kernels._native":
            raise ImportError("no such module")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    native._extension.cache_clear()
    yield
    native._extension.cache_clear()


def test_without_the_extension_everything_still_works(no_extension: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        status = native.native_status()
        assert not status.available
        assert status.levels == ()
        assert "no such module" in (status.reason or "")
        query, batch = Case().build()
        parts = [paged_attention(query, batch, plain_options(64), layer=0) for _ in range(2)]
        assert torch.isfinite(merge(parts).out).all()
        geometry = SliceGeometry(1, 32, 64, "float16")
        raw, coded = np.zeros(geometry.raw_bytes, np.uint8), np.ones(geometry.slice_stride("int8"), np.uint8)
        assert quant.quantise(raw, coded, geometry, 1)
        wanted = quantise_slice(raw, geometry)
        assert wanted is not None
        assert (coded[: geometry.int8_bytes] == wanted).all()
    assert len(caplog.records) == 1, "the log says it once"
    with pytest.raises(RuntimeError, match="absent"):
        native.thread_count()


@needs_native
def test_levels_are_known_and_end_with_the_portable_one() -> None:
    levels = native.native_status().levels
    assert set(levels) <= set(native.LEVELS)
    assert levels[-1] == "portable"
    query, batch = Case().build()
    with pytest.raises(ValueError, match="neon9"):
        native.paged_attention(query, batch, plain_options(64), layer=0, level="neon9")


@needs_native
@pytest.mark.parametrize("count", [0, -1, 1025])
def test_bad_thread_counts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count"):
        native.set_thread_count(count)


@needs_native
def test_default_thread_count_is_the_affinity() -> None:
    code = "from kvstore.kernels import native; print(native.thread_count())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == len(os.sched_getaffinity(0))


@needs_native
def test_concurrent_callers_get_their_own_answers(two_threads: None) -> None:
    cases = [Case(2, 2, 64, contexts=(900 + seed,), queries=(1,), seed=seed) for seed in range(4)]
    built = [case.build() for case in cases]
    wanted = [paged_attention(query, batch, plain_options(64), layer=1) for query, batch in built]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            calls = [pool.submit(paged_attention, query, batch, plain_options(64), layer=1) for query, batch in built]
            for call, answer in zip(calls, wanted, strict=True):
                assert torch.allclose(call.result().out, answer.out, atol=1e-6)


def _merge_in_child() -> bool:
    part = Partial(torch.ones(600, 4, 8), torch.zeros(600, 4))
    return bool((native.merge([part, part], None).out == 1).all())


@needs_native
def test_pool_works_after_fork(two_threads: None) -> None:
    assert _merge_in_child()
    with get_context("fork").Pool(1) as children:
        assert children.apply(_merge_in_child)


@needs_native
def test_crc32c_is_the_standard_one() -> None:
    assert native.crc32c(b"123456789") == 0xE3069283
    assert native.crc32c(b"") == 0
    assert native.crc32c(bytes(32)) == 0x8A9136AA


def _bitwise_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@needs_native
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 3071, 3072, 3073, 6151, 9216])
def test_copy_and_checksum_at_every_edge(size: int) -> None:
    rng = np.random.default_rng(size)
    source = rng.integers(0, 256, size + 3, dtype=np.uint8)[3:]
    target = np.full(size + 8, 0xEE, np.uint8)
    wanted = _bitwise_crc(source.tobytes())
    assert native.copy_crc32c(target, source) == wanted
    assert (target[:size] == source).all()
    assert (target[size:] == 0xEE).all()
    assert native.crc32c(source) == wanted
    cut = size // 3
    assert native.crc32c(source[cut:], native.crc32c(source[:cut])) == wanted
    assert native.copy_crc32c(target, source[cut:], native.crc32c(source[:cut])) == wanted


@needs_native
@pytest.mark.parametrize("offset", [0, 1, 32])
@pytest.mark.parametrize("more", [0, 77, 3071, 3072, 12287])
def test_large_copies_and_checksums_wherever_they_land(offset: int, more: int) -> None:
    size = (1 << 20) + more
    source = np.random.default_rng(more).integers(0, 256, size, dtype=np.uint8)
    target = np.full(offset + size + 64, 0xEE, np.uint8)
    assert native.copy_crc32c(target[offset:], source) == native.crc32c(source)
    assert (target[offset : offset + size] == source).all()
    assert (target[offset + size :] == 0xEE).all()
    assert (target[:offset] == 0xEE).all()


@needs_native
@pytest.mark.parametrize(
    ("blocks", "lengths"),
    [
        (1, (1, 5, 5, 5)),
        (2, (3, 300, 512, 300)),
        (3, (4, 131_072, 135_168, 131_072)),
        (5, (3, 100_001, 100_352, 100_001)),
    ],
)
def test_slices_of_many_blocks_are_copied_and_summed(
    two_threads: None, blocks: int, lengths: tuple[int, int, int, int]
) -> None:
    slices, size, target_stride, source_stride = lengths
    rng = np.random.default_rng(size)
    sources = [rng.integers(0, 256, (slices - 1) * source_stride + size, dtype=np.uint8) for _ in range(blocks)]
    targets = [np.full((slices - 1) * target_stride + size, 0xEE, np.uint8) for _ in range(blocks)]
    packed = native.copy_slices_crc32c(list(targets), list(sources), lengths)
    crcs = np.frombuffer(packed, "<u4").reshape(blocks, slices)
    for source, target, row in zip(sources, targets, crcs, strict=True):
        for layer in range(slices):
            written = target[layer * target_stride :][:size]
            assert (written == source[layer * source_stride :][:size]).all()
            assert row[layer] == native.crc32c(np.ascontiguousarray(written))
            assert (target[layer * target_stride + size : (layer + 1) * target_stride] == 0xEE).all()


@needs_native
@pytest.mark.parametrize("offset", [0, 1, 32])
@pytest.mark.parametrize("size", [0, 5, 63, 64, 65, 4096, 70_001])
def test_copies_past_the_caches(offset: int, size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.full(offset + size + 64, 0xEE, np.uint8)
    native.copy_past_caches(target[offset:], source)
    assert (target[offset : offset + size] == source).all()
    assert (target[offset + size :] == 0xEE).all()
    assert (target[:offset] == 0xEE).all()
    with pytest.raises(ValueError, match="smaller"):
        native.copy_past_caches(target[:size], np.zeros(size + 1, np.uint8))
    with pytest.raises(ValueError, match="target"):
        native.copy_past_caches(bytes(size), source)


@needs_native
def test_slices_that_do_not_fit_are_refused() -> None:
    good = [np.zeros(20, np.uint8)]
    for targets, sources, lengths, words in (
        (good, good * 2, (2, 8, 12, 12), "differ"),
        (good, good, (0, 8, 12, 12), "no slices"),
        (good, good, (2, 8, 7, 12), "stride"),
        (good, good, (2, 8, 12, 13), "source is too small"),
        (good, good, (3, 8, 8, 6), "stride"),
        (good, good, (3, 8, 8, 8), "target is too small"),
        ([b"a" * 20], good, (2, 8, 12, 12), "target is no writable"),
        (good, good, (1 << 60, 8, 8, 8), "too many"),
    ):
        with pytest.raises(ValueError, match=words):
            native.copy_slices_crc32c(targets, sources, lengths)  # type: ignore[arg-type]
    assert native.copy_slices_crc32c([], [], (2, 8, 12, 12)) == b""


@needs_native
def test_copy_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="smaller"):
        native.copy_crc32c(bytearray(3), b"four")
    with pytest.raises(ValueError, match="target"):
        native.copy_crc32c(b"1234", b"four")


@needs_native
def test_read_all_sums_words(two_threads: None) -> None:
    words = np.arange(300_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert native.read_all(words) == int(words.sum(dtype=np.uint64))
    assert native.read_all(words.view(np.uint8)[:-3]) == int(words[:-1].sum(dtype=np.uint64))
