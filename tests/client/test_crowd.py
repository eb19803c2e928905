"""Two hundred clients at a time, doing everything, while one of them is killed each second."""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
import threading
import time

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.v1 import admin_pb2
from tests.client.harness import DaemonProcess, ask, until

PROCESSES, EACH, KILLED = 8, 24, 8


def begin(socket: str, clients: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.client.crowd", str(socket), str(clients), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [300])
def test_two_hundred_clients_get_answers_or_typed_refusals_and_leave_nothing(tmp_path, seconds):
    daemon = DaemonProcess(tmp_path, "--host=64MiB", "--ssd=128MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    daemon.start()
    crowd = [begin(daemon.socket, EACH, seconds) for _ in range(PROCESSES)]
    doomed = [begin(daemon.socket, 1, 10_000) for _ in range(KILLED)]
    try:
        for process in crowd:
            assert json.loads(process.stdout.readline()) == "ready"
        second = threading.Event()
        chance, killed, end = random.Random(1), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            second.wait(1)
            victim = chance.randrange(KILLED)
            doomed[victim].kill()
            doomed[victim].wait()
            doomed[victim].stdout.close()
            doomed[victim], killed = begin(daemon.socket, 1, 10_000), killed + 1
        told = [json.loads(process.communicate(timeout=120)[0]) for process in crowd]
    finally:
        for process in [*crowd, *doomed]:
            process.kill()
            process.wait()
    calls, errors = (
        sum((collections.Counter(one[name]) for one in told), collections.Counter()) for name in ("calls", "errors")
    )
    matches = sorted(found for one in told for found in one["matches"])
    rate = sum(calls.values()) / seconds
    print(f"{rate:,.0f} calls a second of {PROCESSES * EACH} clients, {killed} killed: {dict(calls)}")
    print(
        f"match p50 {matches[len(matches) // 2]:.2f} ms, p99 {matches[int(len(matches) * 0.99)]:.1f} ms; {dict(errors)}"
    )
    assert [wrong for one in told for wrong in one["wrong"]] == []
    assert [error for error in errors if not error.startswith("refused: ")] == []
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as watcher:

        def at_rest() -> bool:
            status = ask(watcher, "Status", admin_pb2.StatusResponse)
            left = status.counters["copies_pinned"], status.reservations, status.leases, status.sessions - 1
            return left == (0, 0, 0, 0)

        until(at_rest)
    assert daemon.stop() == 0
    assert [line for line in daemon.lines if "Traceback" in line or " ERROR " in line] == []
