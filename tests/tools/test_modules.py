"""Each tool runs as a module too, where the commands of the package are not on the path."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["kvctl", "kvbench", "kvengine", "crashtest"])
def test_help_of_each(name):
    command = [sys.executable, "-m", f"kvstore.tools.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    usage, command_name = done.stdout.lower().split()[:2]
    assert usage == "usage:"
    assert command_name in (name, "python")
    assert name in done.stdout
