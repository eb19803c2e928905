"""``kvbench attention`` and ``kvbench codec``: rows of the kernels' own benchmarks, beside what memory allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.core.errors import Unavailable
from kvstore.kernels import bench, native
from kvstore.tools.kvbench.rows import Row


def run_attention(threads: tuple[int, ...], *, long: bool, repeats: int) -> list[Row]:
    """Decode attention over paged blocks, by model, context, codec and threads."""
    _require_native()
    return rows_of(bench.attention_rows(threads=threads, long=long, repeats=repeats))


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
