"""``gpu_check`` where there is no GPU, and what it needs to be imported."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tools import gpu_check

ROOT = Path(__file__).resolve().parents[2]

HIDE = """
import sys
for name in ("pydantic", "lz4", "crc32c", "grpc", "google.protobuf", "typer", "rich", "transformers"):
    sys.modules[name] = None
from kvstore.tools import gpu_check
sys.exit(gpu_check.main([]))
"""


def run(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(300)
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """As a plain script, from elsewhere, and as a module where the service's own dependencies are missing."""
    pytest.importorskip("torch")
    pytest.importorskip("triton", reason="triton is not installed")
    script = run(sys.executable, str(ROOT / "tools/gpu_check.py"), folder=tmp_path)
    hidden = run(sys.executable, "-c", HIDE)
    for done in (script, hidden):
        assert done.returncode == gpu_check.EXIT_PASSED, done.stderr
        assert done.stdout.startswith("no GPU")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("numpy", "no_such_package"))
    assert gpu_check.main([]) == gpu_check.EXIT_MISSING
    assert capsys.readouterr().out.startswith("missing: no_such_package")


def test_another_process_is_told_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert Path(command[command.index("--go-on") + 1]).read_text() == "found"
        assert command[:2] == [sys.executable, str(ROOT / "tools/gpu_check.py")]
        assert command[-5:] == ["--seconds", "12.5", "--markdown", "out.md", "--checks-only"]
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", note)
    parsed = argparse.Namespace(markdown=Path("out.md"), checks_only=True)
    assert gpu_check.go_on("found", 12.5, parsed) == 7


class FakeReport:
    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def table(self) -> str:
        return "the table"

    def markdown(self) -> str:
        return "## card\n"


@pytest.mark.parametrize(("passed", "code"), [(True, gpu_check.EXIT_PASSED), (False, gpu_check.EXIT_FAILED)])
def test_the_table_is_printed_and_written(
    passed: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "performance.md"
    assert gpu_check.finish(FakeReport(passed), file) == code  # type: ignore[arg-type]
    assert capsys.readouterr().out == "the table\n"
    assert file.read_text() == "## card\n"
