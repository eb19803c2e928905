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
    yield from _asked_anew()


@pytest.fixture
def older_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that was built before the functions that this code calls came."""
    monkeypatch.setattr(importlib.import_module("kvstore.kernels._native"), "INTERFACE", native.INTERFACE - 1)
    yield from _asked_anew()


def _asked_anew() -> Iterator[None]:
    known = (native._extension, native.available, native._module)
    for answer in known:
        answer.cache_clear()
    yield
    for answer in known:
        answer.cache_clear()


@needs_native
def test_an_extension_of_other_sources_is_not_used(older_extension: None, caplog: pytest.LogCaptureFixture) -> None:
    assert not native.available()
    assert "build it again" in caplog.text
    assert "build it again" in (native.native_status().reason or "")


@needs_native
def test_the_interface_number_goes_with_what_the_extension_has() -> None:
    """Where this fails, functions came or went: raise INTERFACE (native.py, module.cpp) and count them here."""
    found = native.extension()
    names = [name for name in vars(found) if not name.startswith("__")]
    methods = [name for name in vars(found.Index) if not name.startswith("__")]
    assert (found.INTERFACE, len(names), len(methods)) == (3, 28, 39)


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
@pytest.mark.parametrize("gap", [0, 3, 64])
@pytest.mark.parametrize(("slices", "size"), [(1, 1), (3, 63), (2, 64), (5, 65), (4, 300_001), (1, 1_300_000)])
def test_copies_of_slices(two_threads: None, offset: int, gap: int, slices: int, size: int) -> None:
    rng = np.random.default_rng(size)
    sources = [rng.integers(0, 256, slices * size, dtype=np.uint8) for _ in range(2)]
    targets = [np.full(offset + slices * (size + gap) + 64, 0xEE, np.uint8) for _ in range(2)]
    lengths = (slices, size, size + gap, size)
    native.copy_slices([target[offset:] for target in targets], [*sources], lengths, 2)
    for source, target in zip(sources, targets, strict=True):
        expected = np.full_like(target, 0xEE)
        for i in range(slices):
            expected[offset + i * (size + gap) :][:size] = source[i * size :][:size]
        assert (target == expected).all()


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
        with pytest.raises(ValueError, match=words):
            native.copy_slices(targets, sources, lengths, 1)  # type: ignore[arg-type]
    assert native.copy_slices_crc32c([], [], (2, 8, 12, 12)) == b""
    native.copy_slices([], [], (2, 8, 12, 12), 1)
    with pytest.raises(ValueError, match="threads is 0"):
        native.copy_slices([], [], (2, 8, 12, 12), 0)


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
