"""Imports go one way and in no circle; heavy packages stay in their rooms: the contracts of ``pyproject.toml``."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[2]


def test_rooms_import_only_rooms_below_them_and_in_no_circle(capsys):
    found = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    said = capsys.readouterr().out
    assert found == 0, said
    files = re.search(r"Analyzed (\d+) files", said)
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
