"""Running test files in a process of their own: whether Triton interprets or compiles is settled at its import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_tests(folder: str, names: tuple[str, ...], cache: Path, *options: str, interpreted: bool) -> str:
    """Run files of a folder beside this one with pytest; return what it printed.

    Fails with that output unless tests ran and all passed. ``cache`` takes what Triton compiles.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    files = [f"tests/kernels/{folder}/{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"\b[1-9]\d* passed", said), said
    return said
