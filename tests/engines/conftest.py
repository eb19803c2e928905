"""Tests with other people's engines, each in a virtual environment of its own: ``make test-engines`` runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.tools.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def kvstored() -> tuple[str, ...]:
    """The daemon runs in the project's own environment: an engine's has the client alone."""
    own = ROOT / ".venv" / "bin" / "python"
    return (str(own if own.exists() else sys.executable), "-m", "kvstore.daemon.main")


@pytest.fixture
def daemon(kvstored: tuple[str, ...]) -> Iterator[DaemonProcess]:
    """One daemon a test, with a little HOST and SSD."""
    with TemporaryDirectory(prefix="kve-") as folder:
        flags = {"device": "0", "host": "64 MiB", "ssd": "128 MiB", "ssd-dir": f"{folder}/ssd", "ssd-free-floor": "0"}
        with DaemonProcess(Path(folder), flags, kvstored) as found:
            found.start()
            yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers, whose answers depend on each of its tokens."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, "-m", "tests.engines.tiny", str(folder)], cwd=ROOT, check=True, timeout=300)
    return folder
