"""Imports go one way and in no circle; heavy packages stay in their rooms: the contracts of ``pyproject.toml``."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_rooms_import_only_rooms_below_them_and_in_no_circle():
    # A process of its own: the linter sets up logging for all of its process.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = re.search(r"Analyzed (\d+) files", done.stdout)
    assert files is not None
    assert int(files[1]) > 400, "the links to engine, kernels and tools were not followed"


def test_every_package_that_is_heavy_or_dangerous_has_a_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lists = [each.get("protected_modules", []) + each.get("forbidden_modules", []) for each in contracts]
    assert set().union(*lists) >= {"torch", "triton", "transformers", "grpc", "pickle", "marshal", "shelve"}


def test_package_root_and_core_import_no_heavy_package():
    code = "import sys, kvstore.core.types; print(sorted({'grpc', 'torch', 'numpy', 'google'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
