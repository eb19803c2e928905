"""Check and measure the GPU kernels on the machine at hand: ``python -m kvstore.tools.gpu_check``, or this file itself.

Needs torch, triton and numpy, and nothing else of this project's dependencies, so that it runs wherever a GPU is.
It runs every kernel against its reference, then times it beside a plain copy, and prints one table, in under eight
minutes. Progress goes to stderr. ``--markdown FILE`` also writes the table for docs/performance.md.

Exit codes: 0 all checks passed, or there is no GPU (which is said); 1 a check failed; 2 torch, triton or numpy is
missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and importlib.util.find_spec("kvstore") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from kvstore.kernels.gpu_report import Report

NEEDED = ("numpy", "torch", "triton")

EXIT_PASSED, EXIT_FAILED, EXIT_MISSING = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and the benchmarks; the exit code is described at the head of the file."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables as markdown")
    parser.add_argument("--checks-only", action="store_true", help="leave the benchmarks out")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing new after this time (default 420)")
    parsed = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}; the GPU check needs {', '.join(NEEDED)}")
        return EXIT_MISSING
    from kvstore.kernels import gpu_report  # noqa: PLC0415  (only when what it needs is there)

    device = gpu_report.find_device()
    if device is None:
        print("no GPU: torch sees no CUDA or ROCm device here, so there is nothing to check")
        return EXIT_PASSED
    report = gpu_report.measure(
        device,
        deadline=time.monotonic() + parsed.seconds,
        benchmarks=not parsed.checks_only,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    return finish(report, parsed.markdown)


def finish(report: Report, markdown: Path | None) -> int:
    """Print the table, write the markdown if asked for, and return the exit code."""
    print(report.table())
    if markdown is not None:
        markdown.write_text(report.markdown())
    return EXIT_PASSED if report.passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
