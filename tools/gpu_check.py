"""Check and measure the GPU kernels on the machine at hand: ``python -m kvstore.tools.gpu_check``, or this file itself.

Needs torch, triton and numpy, and nothing else of this project's dependencies, so that it runs wherever a GPU is.
It runs every kernel against its reference, then times it beside a plain copy, and prints one table, in under eight
minutes. Progress goes to stderr. ``--markdown FILE`` also writes the table for docs/performance.md.

A kernel that reads or writes where it must not takes the device away from its process. The command then starts itself
again, and goes on behind what failed.

Exit codes: 0 all checks passed, or there is no GPU (which is said); 1 a check failed; 2 torch, triton or numpy is
missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and importlib.util.find_spec("kvstore") is None:
    # In place of this folder, whose own files (text.py, output.py) would hide packages of those names.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

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
    parser.add_argument("--go-on", type=Path, metavar="FILE", help=argparse.SUPPRESS)
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
    begin = time.monotonic()
    report = gpu_report.measure(
        device,
        deadline=begin + parsed.seconds,
        work=gpu_report.Work(benchmarks=not parsed.checks_only),
        say=say,
        before=gpu_report.from_json(parsed.go_on.read_text()) if parsed.go_on else None,
    )
    left = parsed.seconds - (time.monotonic() - begin)
    if report.lost and left > 0:
        say(f"the device is lost after: {report.checked[-1].name}; going on in a fresh process")
        return go_on(gpu_report.to_json(report), left, parsed)
    return finish(report, parsed.markdown)


def say(text: str) -> None:
    """Print progress, for people."""
    print(text, file=sys.stderr, flush=True)


def go_on(found: str, left: float, parsed: argparse.Namespace) -> int:
    """Run this file in a process that has a device and knows what was ``found``; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file = Path(folder, "found.json")
        file.write_text(found)
        words = ["--go-on", str(file), "--seconds", str(left)]
        words += ["--markdown", str(parsed.markdown)] if parsed.markdown else []
        words += ["--checks-only"] if parsed.checks_only else []
        return subprocess.run([sys.executable, str(Path(__file__).resolve()), *words], check=False).returncode


def finish(report: Report, markdown: Path | None) -> int:
    """Print the table, write the markdown if asked for, and return the exit code."""
    print(report.table())
    if markdown is not None:
        markdown.write_text(report.markdown())
    return EXIT_PASSED if report.passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
