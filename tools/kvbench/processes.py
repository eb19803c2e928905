"""What processes take together: memory by proportional resident sizes, so that shared pages count once; time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


def resident_bytes(pids: Sequence[int]) -> int:
    """The sum of the processes' shares of resident memory; of memory that other processes map too, their part only."""
    return sum(_proportional(pid, "Pss") for pid in pids)


def unshared_bytes(pids: Sequence[int]) -> int:
    """As ``resident_bytes``, without memory that is made to be shared, such as arenas and buffers."""
    return sum(_proportional(pid, "Pss") - _proportional(pid, "Pss_Shmem") for pid in pids)


def _proportional(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def processor_seconds(*others: int) -> float:
    """Processor time that this process and others have taken so far, all threads, in user and system mode."""
    return time.process_time() + sum(process_seconds(pid) for pid in others)


def process_seconds(pid: int) -> float:
    """Processor time of another process."""
    # The name in the second field may hold blanks: what follows its bracket has fixed places.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
