"""The compile gate on representative variants, and that it can fail; run by ``test_triton`` in a process of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
import triton.language as tl

from kvstore.kernels.compile_gate import (
    TARGETS,
    Report,
    Variant,
    attention_variant,
    compile_variant,
    print_row,
    representative_variants,
)


@pytest.mark.parametrize("target", list(TARGETS))
def test_representative_variants_compile(target: str) -> None:
    for variant in representative_variants(TARGETS[target].backend):
        report = compile_variant(variant, target)
        print_row(report)
        assert report.problems == []
        assert report.registers > 0


@triton.jit
def narrow_kernel(source, target):
    place = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    pointer = tl.load(source).to(tl.pointer_type(tl.float16))
    tl.store(target + place, tl.load(pointer + place).to(tl.float32))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_gate_sees_narrow_loads(target: str) -> None:
    variant = Variant("narrow", narrow_kernel, {"source": "*i64", "target": "*fp32"}, {}, 4)
    assert any("2 bytes or less" in problem for problem in compile_variant(variant, target).problems)


@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_the_gate_sees_spills(target: str) -> None:
    """A prefill tile over int8 with twice the rows that ship does not fit in the registers."""
    variant = attention_variant(TARGETS[target].backend, 128, "float16", "int8", decode=False, masked=True)
    form = replace(variant.constants["FORM"], block_m=64)
    tall = replace(variant, constants={"FORM": form}, warps=4 if target == "sm_90" else 8)
    assert any("spills" in problem for problem in compile_variant(tall, target).problems)


def test_the_gate_sees_too_much_shared_memory() -> None:
    fits = Report("x", "gfx942", 100, 0, 0, 65_536, 0, 0)
    assert fits.problems == []
    assert "shared memory" in replace(fits, shared_bytes=65_537).problems[0]
    assert replace(fits, shared_bytes=65_537, target="sm_90").problems == []
