"""Installing the package beside vLLM changes nothing that vLLM has installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_the_package_brings_itself_and_two_checksum_and_compression_libraries(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    subprocess.run([*command, "--report", str(report), f"{ROOT}[vllm]"], check=True)
    ours = json.loads(report.read_text())["install"][0]["metadata"]
    assert ours["name"] == "tiered-kvstore"
    assert "vllm" in ours["provides_extra"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    subprocess.run([*command, "--report", str(report), f"{ROOT}[vllm]"], check=True)
    names = {found["metadata"]["name"].lower() for found in json.loads(report.read_text())["install"]}
    assert names <= {"tiered-kvstore", "crc32c", "lz4"}
