"""The Triton kernels without a GPU: their arithmetic in the interpreter, their code for every target by compiling."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.children import run_tests

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(600),
]


def test_arithmetic_in_the_interpreter(tmp_path: Path) -> None:
    run_tests("interpreted", ("attention", "codec", "merge", "move", "report"), tmp_path, interpreted=True)


def test_code_for_every_target(tmp_path: Path) -> None:
    run_tests("compiled", ("gate", "launch"), tmp_path, interpreted=False)


@pytest.mark.slow
def test_what_takes_longer(tmp_path: Path) -> None:
    run_tests("interpreted", ("attention", "codec", "report"), tmp_path, "-m", "slow", interpreted=True)
    run_tests("compiled", ("gate",), tmp_path, "-m", "slow", interpreted=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_shipped_variant_compiles(target: str, tmp_path: Path) -> None:
    run_tests("compiled", ("everything",), tmp_path, "-m", "slow", "-k", target, interpreted=False)
