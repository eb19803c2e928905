"""How much memory processes take together: proportional resident sizes, so that shared pages count once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def resident_bytes(pids: Sequence[int]) -> int:
    """The sum of the processes' shares of resident memory; of memory that other processes map too, their part only."""
    return sum(_proportional(pid) for pid in pids)


def _proportional(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
