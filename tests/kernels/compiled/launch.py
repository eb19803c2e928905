"""The launch code on a driver that only compiles: every launch must be one that the gate compiles.

Run by ``test_triton`` in a process of its own. Triton's own binder decides here what a launch's arguments are
specialised for, so a type, a constant or an alignment that the gate does not know would show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvstore.kernels import triton_attention, triton_launch, triton_merge, triton_move, triton_quant
from kvstore.kernels.compile_gate import TARGETS, attention_variant, other_variants
from tests.kernels.cases import Case, plain_options

TARGET = TARGETS["sm_90"]


@dataclass
class Launch:
    """What one launch compiled: the arguments' types, which of them are aligned, and the options."""

    name: str
    grid: tuple[int, ...]
    signature: dict[str, str]
    aligned: set[str]
    warps: int
    stages: int
    fused: bool
    registers_max: int | None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of the test is compiled for TARGET, noted here, and not run."""
    found: list[Launch] = []
    run = JITFunction.run

    def note(self: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        aligned = {self.arg_names[path[0]] for path, attributes in kernel.src.attrs.items() if attributes}
        options_used = kernel.metadata
        found.append(
            Launch(
                self.fn.__name__,
                grid,
                dict(kernel.src.signature),
                aligned,
                options_used.num_warps,
                options_used.num_stages,
                options_used.enable_fp_fusion,
                options_used.maxnreg,
            )
        )
        return kernel

    fake = SimpleNamespace(
        get_current_target=lambda: TARGET, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    monkeypatch.setattr(JITFunction, "run", note)
    for module in (triton_attention, triton_merge, triton_move, triton_quant):
        monkeypatch.setattr(module, "require_device", lambda name, tensor: None)
    monkeypatch.setattr(triton_attention, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(driver, "_active", fake)
    return found


def check(launch: Launch, variant: Any) -> None:
    assert launch.signature == variant.signature
    pointers = {name for name, kind in variant.signature.items() if kind.startswith("*")}
    assert launch.aligned == pointers | ({"words"} & set(variant.signature))
    assert (launch.warps, launch.stages) == (variant.warps, variant.stages)
    assert launch.registers_max == variant.options.get("maxnreg")
    assert launch.fused is variant.options.get("enable_fp_fusion", True)


def test_decode_and_its_merge(launches: list[Launch]) -> None:
    query, batch = Case(8, 4, 128, contexts=(64 * 40, 64), queries=(1, 1)).build()
    triton_attention.paged_attention(query, batch, plain_options(128), layer=0)
    attention, merge = launches
    assert attention.grid == (2, 8, 10)
    check(attention, attention_variant("cuda", 128, "float16", "raw", decode=True, masked=False))
    others = {variant.kernel.fn.__name__: variant for variant in other_variants(128, "float16")}
    assert merge.grid == (64,)
    check(merge, others["merge_kernel"])


def test_prefill_of_int8_with_masks(launches: list[Launch]) -> None:
    query, batch = Case(8, 4, 128, dtype="bfloat16", codec="int8", contexts=(100,), queries=(100,)).build()
    options = replace(plain_options(128), window=50, soft_cap=30.0)
    triton_attention.paged_attention(query, batch, options, layer=1)
    (launch,) = launches
    assert launch.grid == (13, 8, 1)
    check(launch, attention_variant("cuda", 128, "bfloat16", "int8", decode=False, masked=True))


def test_codec_and_copy(launches: list[Launch]) -> None:
    addresses, geometry = torch.tensor([4096, 8192]), Case(8, 4, 128).geometry
    triton_quant.quantise(addresses, addresses, geometry, 3)
    triton_quant.dequantise(addresses, addresses, geometry, 3)
    triton_move.copy_blocks(addresses, addresses, 64 * 1024)
    others = {variant.kernel.fn.__name__: variant for variant in other_variants(128, "float16")}
    assert [launch.grid for launch in launches] == [(6, 8, 4), (6, 8, 2), (6, 8, 4), (6, 8, 2), (2, 4)]
    for launch in launches:
        check(launch, others[launch.name])


def test_kernels_are_compiled_here_and_refuse_the_cpu() -> None:
    assert not triton_launch.interpreted()
    query, batch = Case(1, 1, 32).build()
    with pytest.raises(ValueError, match="query is on cpu; Triton kernels need it on a GPU"):
        triton_attention.paged_attention(query, batch, plain_options(32), layer=0)
    with pytest.raises(ValueError, match="sources is on cpu"):
        triton_move.copy_blocks(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 16)
