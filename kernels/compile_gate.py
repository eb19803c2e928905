"""Compile every Triton kernel for every target without a GPU, and hold the result to what the hardware has.

For each variant and target the gate reads what the compiler's own tools say: registers, bytes spilled to memory,
shared memory, and how many global loads are 2 bytes or narrower (a lost alignment hint turns 16-byte loads into
eight of those, and nothing else shows it). ``python -m kvstore.kernels.compile_gate`` prints the table; ``--all`` takes
every shipped variant instead of the representative ones. Exit code 1 when a row fails.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.triton_form import choose_form
from kvstore.kernels.triton_merge import merge_kernel
from kvstore.kernels.triton_move import WORDS_A_PROGRAM, copy_kernel
from kvstore.kernels.triton_paged import paged_attention_kernel
from kvstore.kernels.triton_quant import (
    codec_form,
    dequantise_keys_kernel,
    dequantise_values_kernel,
    quantise_keys_kernel,
    quantise_values_kernel,
)

__all__ = ["TARGETS", "Report", "Variant", "all_variants", "compile_variant", "main", "representative_variants"]

TARGETS: Final = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

SHARED_LIMIT: Final = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory that one program may have."""

NARROW_LOADS_MAX: Final = {"cuda": 20, "hip": 40}
"""Scales of an int8 head and of its tokens are loaded 2 bytes at a time (on AMD twice, the loop being peeled); tiles
must not be."""

HEAD_DIMS: Final = (32, 64, 80, 96, 112, 128, 256)
FORMS: Final = (
    ("float16", "raw"),
    ("bfloat16", "raw"),
    ("float32", "raw"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
)
"""Dtypes of slices and queries, and codecs; int8 differs only between queries of 16 bits and of 32."""

POINTERS: Final = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}


@dataclass(frozen=True)
class Variant:
    """One kernel with the types and constants that it is launched with; ``narrow_max`` overrides the target's."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    narrow_max: int | None = None


@dataclass(frozen=True)
class Report:
    """What a compiled variant uses. ``scalar_spills`` go to vector registers, not to memory (AMD only)."""

    variant: str
    target: str
    registers: int
    spilled_bytes: int
    scalar_spills: int
    shared_bytes: int
    narrow_loads: int
    narrow_max: int

    @property
    def problems(self) -> list[str]:
        """What the target does not have, in words; empty when the variant may ship."""
        found = []
        if self.spilled_bytes:
            found.append(f"spills {self.spilled_bytes} bytes a thread to memory")
        if self.shared_bytes > SHARED_LIMIT[self.target]:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, {SHARED_LIMIT[self.target]} exist")
        if self.narrow_loads > self.narrow_max:
            found.append(f"has {self.narrow_loads} global loads of 2 bytes or less, {self.narrow_max} are expected")
        return found


def attention_variant(  # noqa: PLR0913  (the axes of the gate)
    backend: str, head_dim: int, dtype: str, codec: str, *, decode: bool, masked: bool, group: int = 4
) -> Variant:
    """Return paged attention as ``triton_attention`` launches it; ``masked`` is with window and soft cap."""
    shape = choose_form(
        SliceGeometry(8, head_dim, 64, dtype),
        codec,
        group,
        rows_a_sequence=group if decode else 1024,
        window=masked,
        soft_cap=masked,
        backend=backend,
    )
    signature = {"query": POINTERS[dtype], "addresses": "*i64", "starts": "*i32"}
    signature |= {"query_offsets": "*i32", "context_lens": "*i32", "out": "*fp32", "lse": "*fp32"}
    signature |= dict.fromkeys(("rows", "sequences", "blocks", "layer_offset"), "i32")
    signature |= {"score_scale": "fp32", "window": "i32", "soft_cap": "fp32", "FORM": "constexpr"}
    kind = f"{'decode' if decode else 'prefill'} {dtype if codec == 'raw' else f'int8 ({dtype})'} d{head_dim}"
    return Variant(
        kind + (" window cap" if masked else ""),
        paged_attention_kernel,
        signature,
        {"FORM": shape.form},
        shape.warps,
        shape.stages,
        shape.options,
        # There the loop is peeled twice, and a thread of a small head holds eight tokens, whose scales, each under a
        # mask of its own, are loaded one by one. All narrow loads are of scales and zero points.
        narrow_max=80 if backend == "hip" and codec == "int8" and head_dim <= 64 else None,
    )


def other_variants(head_dim: int, dtype: str) -> Iterator[Variant]:
    """Yield the codec's kernels for one head size and dtype, the merge for that head size, and the copy."""
    yield from codec_variants(head_dim, dtype)
    yield merge_variant(head_dim)
    yield copy_variant()


def codec_variants(head_dim: int, dtype: str) -> Iterator[Variant]:
    """Yield quantise and dequantise of K and of V."""
    form = codec_form(SliceGeometry(8, head_dim, 64, dtype))
    addresses = {"raw_addresses": "*i64", "coded_addresses": "*i64"}
    rest = {"layers": "i32", "FORM": "constexpr"}
    for kernel in (quantise_keys_kernel, quantise_values_kernel):
        name = f"{kernel.__name__.removesuffix('_kernel')} {dtype} d{head_dim}"
        signature = addresses | {"refused": "*i32"} | rest
        yield Variant(name, kernel, signature, {"FORM": form}, 4, options={"enable_fp_fusion": False})
    for kernel in (dequantise_keys_kernel, dequantise_values_kernel):
        name = f"{kernel.__name__.removesuffix('_kernel')} {dtype} d{head_dim}"
        yield Variant(name, kernel, addresses | rest, {"FORM": form}, 4)


def merge_variant(head_dim: int) -> Variant:
    """Return the merge with sinks, of 32 heads."""
    signature: dict[str, str] = dict.fromkeys(("part_out", "part_lse", "sinks", "out", "lse"), "*fp32")
    signature |= {"parts": "i32", "pairs": "i32"}
    constants = {"HEADS": 32, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "HAS_SINKS": True}
    signature |= dict.fromkeys(constants, "constexpr")
    return Variant(f"merge d{head_dim}", merge_kernel, signature, constants, 1 if head_dim <= 64 else 4)


def copy_variant() -> Variant:
    """Return the copy of blocks."""
    signature = {"sources": "*i64", "targets": "*i64", "words": "i32", "WORDS": "constexpr"}
    return Variant("copy", copy_kernel, signature, {"WORDS": WORDS_A_PROGRAM}, 4, narrow_max=0)


def representative_variants(backend: str) -> Iterator[Variant]:
    """Yield the variants that the quick tests compile: each kernel once, attention at its most demanding."""
    yield attention_variant(backend, 128, "bfloat16", "raw", decode=True, masked=False)
    yield attention_variant(backend, 128, "float16", "int8", decode=True, masked=True)
    yield attention_variant(backend, 256, "bfloat16", "raw", decode=False, masked=True)
    yield from other_variants(128, "float16")


def all_variants(backend: str) -> Iterator[Variant]:
    """Yield everything that ships: head sizes, dtypes, codecs, decode and prefill, with and without masks."""
    for head_dim in HEAD_DIMS:
        for dtype, codec in FORMS:
            if dtype == "float32" and codec == "raw" and head_dim > 128:
                continue
            for decode in (True, False):
                for masked in (False, True):
                    yield attention_variant(backend, head_dim, dtype, codec, decode=decode, masked=masked)
        for dtype in POINTERS:
            yield from codec_variants(head_dim, dtype)
        yield merge_variant(head_dim)
    yield copy_variant()


def compile_variant(variant: Variant, target_name: str) -> Report:
    """Compile for one of ``TARGETS`` and read what the code uses. Compiler errors are passed on."""
    target = TARGETS[target_name]
    names = [name for name in variant.signature if variant.signature[name] != "constexpr"]
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if variant.signature[name].startswith("*") or name == "words"
    }
    source = ASTSource(variant.kernel, variant.signature, variant.constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages} | variant.options
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        registers, spilled, scalar = _cubin_usage(compiled.asm["cubin"])
        narrow = len(re.findall(r"\bld\.global(?:\.\w+)*\.[bus](?:8|16)\b", compiled.asm["ptx"]))
    else:
        assembly = compiled.asm["amdgcn"]
        registers, spilled = _amd_number(assembly, "vgpr_count"), _amd_number(assembly, "private_segment_fixed_size")
        scalar = _amd_number(assembly, "sgpr_spill_count")
        narrow = len(re.findall(r"\b(?:global|flat|buffer)_load_(?:[su]?short|[su]byte)\w*", assembly))
    shared = int(compiled.metadata.shared)
    narrow_max = NARROW_LOADS_MAX[target.backend] if variant.narrow_max is None else variant.narrow_max
    return Report(variant.name, target_name, registers, spilled, scalar, shared, narrow, narrow_max)


def _cubin_usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers of a thread, bytes of stack and local memory, and 0, as the bundled cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"], 0


def _amd_number(assembly: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", assembly)
    if found is None:
        raise ValueError(f"the assembly does not say .{key}; the compiler's metadata has changed")
    return int(found.group(1))


def print_row(report: Report) -> None:
    """Print one row of the table, and what is wrong with it."""
    verdict = "; ".join(report.problems) or "ok"
    print(
        f"{report.variant:<40} {report.target:<7} {report.registers:>9} {report.spilled_bytes:>7}"
        f" {report.shared_bytes:>7} {report.narrow_loads:>6}  {verdict}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the gate and print its table; 0 when every row holds, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m kvstore.kernels.compile_gate", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every shipped variant (half an hour)")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all targets")
    parsed = parser.parse_args(arguments)
    print(f"{'variant':<40} {'target':<7} {'registers':>9} {'spilled':>7} {'shared':>7} {'narrow':>6}  verdict")
    failed = 0
    for target in parsed.target or list(TARGETS):
        backend = TARGETS[target].backend
        for variant in all_variants(backend) if parsed.all else representative_variants(backend):
            report = compile_variant(variant, target)
            print_row(report)
            failed += bool(report.problems)
    print(f"{failed} rows fail" if failed else "every row holds", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
