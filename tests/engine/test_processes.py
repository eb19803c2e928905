"""Engines in processes of their own over one daemon: what one computed the other does not, and a daemon may die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvstore.tools.daemon_process import DaemonProcess
from tests.engine.families import Pair, build_pair, random_prompt

ROOT = Path(__file__).resolve().parents[2]
STEM = random_prompt(1, 640)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon on a short path: those of Unix sockets are bounded."""
    flags = {"device": "8 MiB", "host": "16 MiB", "ssd": "256 MiB", "ssd-dir": str(tmp_path), "ssd-free-floor": "0"}
    with TemporaryDirectory(prefix="kve-") as folder, DaemonProcess(Path(folder), flags) as found:
        found.start()
        yield found


def start(
    daemon: DaemonProcess, prompts: list[list[int]], tokens_max: int, *extra: str, **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.engine.worker", str(daemon.socket), json.dumps(prompts), str(tokens_max)]
    return subprocess.Popen(
        [*command, *extra], cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_the_second_process_computes_only_its_own_suffix(pair: Pair, daemon: DaemonProcess) -> None:
    prompts = [[*STEM, *random_prompt(2, 30)], [*STEM, *random_prompt(3, 41)]]
    first = finish(start(daemon, prompts[:1], 5, PYTHONHASHSEED="1", LC_ALL="C"))
    second = finish(start(daemon, prompts[1:], 5, PYTHONHASHSEED="2", LC_ALL="C.UTF-8"))
    assert first["counters"]["tokens_computed"] == 640 + 30 + 4
    assert second["counters"]["tokens_computed"] == 41 + 4
    assert sum(second["cached"][0].values()) == 640
    for prompt, found in zip(prompts, (first, second), strict=True):
        assert tuple(found["tokens"][0]) == pair.greedy(prompt, 5)


def test_a_daemon_killed_under_load_is_done_without_and_hit_again(pair: Pair, daemon: DaemonProcess) -> None:
    prompts = [[*STEM, *random_prompt(2, 30)], random_prompt(3, 200)]
    process = start(daemon, prompts, 150, "again")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["first"] > 0
    daemon.kill()
    daemon.start()
    found = finish(process)
    assert [tuple(t) for t in found["tokens"]] == [pair.greedy(prompt, 150) for prompt in prompts]
    assert found["counters"]["links_lost"] == 1
    assert sum(found["again"].values()) == 640
