"""``kvbench attention`` and ``kvbench codec``: rows of the kernels' own benchmarks, beside what memory allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.kernels import bench, bench_attention, native
from kvstore.tools.kvbench.rows import Row


def run_attention(threads: tuple[int, ...], *, long: bool, repeats: int, level: str = "") -> list[Row]:
    """Decode attention over paged blocks, by model, context, codec and threads, on one instruction-set level."""
    _require_native()
    levels = native.native_status().levels
    if level and level not in levels:
        raise InvalidArgument("level", level, f"one of {', '.join(levels)}, which this machine has")
    rows = bench_attention.attention_rows(threads=threads, long=long, repeats=repeats, level=level or None)
    return rows_of(rows)


def run_codec(threads: tuple[int, ...], *, repeats: int) -> list[Row]:
    """Quantise, dequantise, and the checksummed copy."""
    _require_native()
    return rows_of(bench.codec_rows(threads=threads, repeats=repeats))


def rows_of(found: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows of the kernels, which know nothing of this tool, as rows of this tool.

    A unit such as ``GB/s of fp16``, or a limit's such as ``ms to read the same bytes``, is the unit and then words.
    """
    rows = []
    for row in found:
        unit, of_what = _unit(row["unit"])
        limit_unit, limit_name = _unit(row["limit_unit"])
        rows.append(
            Row(
                bench=row["bench"],
                case=f"{row['case']} {of_what}".strip(),
                value=row["value"],
                unit=unit,
                limit=row["limit"],
                limit_unit=limit_unit,
                limit_name=limit_name,
                target=row["target"],
                peers=row["peers"],
                peers_measured=True,
                conditions=row["conditions"],
            )
        )
    return rows


def _unit(text: str) -> tuple[str, str]:
    unit, _, words = text.partition(" ")
    return unit.rstrip(","), words


def _require_native() -> None:
    status = native.native_status()
    if not status.available:
        raise Unavailable(f"these benches measure the C++ kernels, which are absent: {status.reason}")
