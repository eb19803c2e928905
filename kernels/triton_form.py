"""What a launch of the paged attention kernel is compiled for: one frozen value, chosen from shapes alone.

``KernelForm`` travels into the kernel as a single compile-time constant. ``choose_form`` is the only place that
knows tile sizes; ``choose_splits`` is the only place that knows how much parallelism a device wants. Both are plain
arithmetic, so they are tested and compiled for every target without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

import triton
import triton.language as tl

from kvstore.kernels.layout import SliceGeometry

RAW_TYPES: Final = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}

DECODE_ROWS: Final = 16
"""Rows of a decode tile: the smallest that tensor cores take, and at least a whole GQA group of most models."""

PREFILL_ROWS: Final = 64
"""Rows of a prefill tile over 16-bit slices."""

SMALL_PREFILL_ROWS: Final = 32
"""Rows of a prefill tile over int8 slices, which need more registers."""

PROGRAMS_A_MULTIPROCESSOR: Final = 4
"""Programs wanted for each multiprocessor when work is split: enough to fill it and to even the end out."""

SMALLEST_SPLIT: Final = 4
"""Blocks below which another split costs more in its merge than it gains."""

LARGEST_SPLITS: Final = 256


@dataclass(frozen=True, slots=True)
class KernelForm:
    """Compile-time constants of one kernel variant. Sizes in elements unless named otherwise.

    ``block_d`` and ``half_d`` are ``head_dim`` and its half, padded to powers of two of at least 16; ``tile`` is the
    number of a block's tokens that one step of the loop takes; ``raw`` is None for int8 slices;
    ``precision`` is how tensor cores multiply fp32 (three tf32 products where there is no fp32 unit);
    ``alignment`` is what every head's first byte is a multiple of, given slices at multiples of 16.
    """

    head_dim: int
    block_d: int
    half_d: int
    block_tokens: int
    tile: int
    kv_heads: int
    group: int
    block_m: int
    raw: tl.dtype | None
    precision: str
    head_bytes: int
    alignment: int
    window: bool
    soft_cap: bool
    fp32_products: bool


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """A form with what it is compiled with: warps, pipeline stages, and a bound on registers (None on AMD).

    The bound is one that no variant reaches: told of none, ptxas aims at an occupancy of its own choice and
    spills 8 bytes here and there to get it.
    """

    form: KernelForm
    warps: int
    stages: int
    registers_max: int | None

    @property
    def options(self) -> dict[str, int]:
        """The launch's keyword arguments besides the form."""
        bound = {} if self.registers_max is None else {"maxnreg": self.registers_max}
        return {"num_warps": self.warps, "num_stages": self.stages} | bound


def choose_form(
    geometry: SliceGeometry,
    codec: str,
    group: int,
    *,
    rows_a_sequence: float,
    window: bool,
    soft_cap: bool,
    backend: str,
    interpreted: bool = False,
) -> LaunchShape:
    """Return the variant for slices of ``geometry`` under ``codec`` read by ``group`` query heads a KV head.

    ``rows_a_sequence`` is the mean of queries times ``group`` over the sequences: tiles are low when it fits into
    ``DECODE_ROWS``. ``backend`` is "cuda" or "hip". Raises ValueError for geometry that the kernel does not take.
    """
    check_geometry(geometry, codec)
    raw = None if codec == "int8" else RAW_TYPES[geometry.dtype]
    full = raw is tl.float32
    wide = geometry.head_dim > 128
    hip = backend == "hip"
    decode = rows_a_sequence <= DECODE_ROWS
    head_bytes = geometry.slice_bytes(codec) // geometry.kv_heads
    form = KernelForm(
        head_dim=geometry.head_dim,
        block_d=max(16, triton.next_power_of_2(geometry.head_dim)),
        half_d=max(16, triton.next_power_of_2(geometry.head_dim // 2)),
        block_tokens=geometry.block_tokens,
        tile=min(geometry.block_tokens, 32 if full or (wide and hip) else 64),
        kv_heads=geometry.kv_heads,
        group=group,
        block_m=_rows_of_a_tile(geometry.head_dim, raw, decode=decode),
        raw=raw,
        precision="tf32x3" if full and not hip and not interpreted else "ieee",
        head_bytes=head_bytes,
        alignment=gcd(16, head_bytes),
        window=window,
        soft_cap=soft_cap,
        fp32_products=interpreted,
    )
    # Stages are what compiles without spilling: fp32 tiles are large, and AMD's prefill has no registers to spare.
    one_stage = (hip and not decode) or (full and geometry.head_dim > 32)
    return LaunchShape(
        form,
        warps=8 if wide and not decode else 4,
        stages=1 if one_stage else 2,
        registers_max=None if hip else 128 if decode and raw in (tl.float16, tl.bfloat16) and not wide else 255,
    )


def _rows_of_a_tile(head_dim: int, raw: tl.dtype | None, *, decode: bool) -> int:
    """The tallest tile that compiles without spilling, for every target of the compile gate."""
    if decode or raw is tl.float32 or (raw is None and head_dim <= 32):
        return DECODE_ROWS
    return SMALL_PREFILL_ROWS if raw is None else PREFILL_ROWS


def check_geometry(geometry: SliceGeometry, codec: str) -> None:
    """Raise ValueError that names the field unless the Triton kernels take slices of this geometry."""
    tokens, smallest = geometry.block_tokens, 32 if codec == "int8" else 16
    if tokens < smallest or tokens & (tokens - 1):
        raise ValueError(f"block_tokens is {tokens}; Triton kernels need a power of two of at least {smallest}")
    largest = 128 if codec == "raw" and geometry.dtype == "float32" else 256
    if not 16 <= geometry.head_dim <= largest:
        raise ValueError(f"head_dim is {geometry.head_dim}; Triton kernels take 16 to {largest} of {geometry.dtype}")
    if codec == "int8" and geometry.head_dim % 2:
        raise ValueError(f"head_dim is {geometry.head_dim}; the int8 codec needs an even number")


def choose_splits(blocks: int, programs: int, multiprocessors: int) -> int:
    """Return into how many shares each sequence's blocks are cut: 1 when ``programs`` fill the device by themselves.

    ``blocks`` is the width of the block table, ``programs`` the tiles times KV heads of the launch.
    """
    wanted = -(-PROGRAMS_A_MULTIPROCESSOR * multiprocessors // max(1, programs))
    return max(1, min(wanted, blocks // SMALLEST_SPLIT, LARGEST_SPLITS))
