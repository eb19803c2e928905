"""Whatever is given, ``kvctl`` says what is wrong in one line and ends with a documented code: no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.tools.kvctl.exits import Exit
from kvstore.v1 import admin_pb2

LONG = "x" * 5000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("why", "--text", "@missing", "--model", "other"), "@missing"),
        (("why", "--text", "@latin", "--model", "other"), "UTF-8"),
        (("why", "--text", "@.", "--model", "other"), "directory"),
        (("why", "--text", f"@{LONG}", "--model", "other"), "too long"),
        (("why", "--text", "a", "--model", LONG), "too long"),
        (("why", "--text", "a", "--model", "latin"), "tokenizer"),
        (("why", "--text", "a", "--model", "broken"), "tokenizer"),
        (("why", "--text", "a", "--model", "other"), "tokenizer"),
        (("why", "--tokens", "[" * 60_000), "whole numbers"),
        (("why", "--tokens", "9" * 5000), "whole numbers"),
        (("why", "--tokens", "1,\udcff"), "whole numbers"),
        (("verify", "--offline", LONG), "too long"),
        (("verify", "--offline", "latin"), "directory"),
        (("verify", "--rate", "99999999999PiB"), "8 EiB"),
        (("verify", "--rate", "1e9"), "number of bytes"),
        (("evict", "--tier", "host", "--bytes", "9" * 4000 + ".5GiB"), "number of bytes"),
        (("evict", "--tier", "host", "--bytes", "8EiB"), "number of bytes"),
        (("evict", "--tier", "hots", "--bytes", "1MiB"), "device, host or ssd"),
        (("show", "zz"), "hexadecimal"),
        (("doctor", "--ssd", LONG), "too long"),
        (("drain", "--timeout", "1e300"), "--timeout"),
        (("status", "--timeout", "inf"), "--timeout"),
        (("status", "--timeout", "nan"), "--timeout"),
    ],
)
def test_a_wrong_value_is_a_usage_error_of_one_line(kvctl, daemon, namespace, folder, words, said):
    pytest.importorskip("tokenizers")
    daemon.replies["Admin/Status"] = admin_pb2.StatusResponse()
    daemon.replies["Admin/DiskUsage"] = admin_pb2.DiskUsageResponse()
    ran = kvctl(*words)
    assert ran.code == Exit.USAGE
    assert said in " ".join(ran.err.replace("│", " ").split())
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert len(ran.err.splitlines()) == 1 or ran.err.startswith("Usage:")


@contextmanager
def listener(path: Path, answer: bytes | None) -> Iterator[threading.Event]:
    """What is no daemon: it says ``answer``, or nothing, and closes at the end. The event: somebody has called."""
    called = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                called.set()
                if answer is not None:
                    peer.sendall(answer)
                peer.recv(1 << 16)
                peer.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield called
        finally:
            server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_sockets_on_which_no_daemon_answers_are_one_line(kvctl_at, tmp_path: Path):
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    for name in ("none", "file", "left", ".", LONG, "\udcff"):
        ran = kvctl_at(tmp_path / name, "status")
        assert (ran.code, len(ran.err.splitlines())) == (Exit.UNREACHABLE, 1), name
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, None):
        path = tmp_path / f"s{len(answer or b'')}"
        with listener(path, answer):
            ran = kvctl_at(path, "status", "--timeout", "0.2")
        assert ran.code in (Exit.UNREACHABLE, Exit.DEADLINE), answer
        assert len(ran.err.splitlines()) == 1


def test_ctrl_c_while_it_waits_ends_with_its_code(tmp_path: Path):
    with listener(tmp_path / "s", None) as called:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.tools.kvctl", "status", "-t", "60"],
            env={**os.environ, "KVSTORE_SOCKET": str(tmp_path / "s")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert called.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (Exit.INTERRUPTED, "", "kvctl: interrupted\n")


def test_the_socket_of_the_environment_is_the_default(kvctl, daemon, monkeypatch: pytest.MonkeyPatch):
    daemon.replies["Admin/Status"] = admin_pb2.StatusResponse()
    monkeypatch.setenv("KVSTORE_SOCKET", "/tmp/b.sock")
    kvctl("status")
    kvctl("status", "-s", "/tmp/a.sock")
    monkeypatch.setenv("KVSTORE_SOCKET", "")
    kvctl("status")
    assert daemon.sockets == ["/tmp/b.sock", "/tmp/a.sock", "/run/test.sock"]


def test_tiers_of_a_block_are_words_in_json(kvctl, daemon, namespace):
    block = admin_pb2.BlockInfo(key=b"\x07" * 32, residency=6)
    daemon.replies["Admin/ShowBlock"] = admin_pb2.ShowBlockResponse(block=block)
    assert kvctl("show", "07" * 32, "-o", "json").json["block"]["residency"] == ["host", "ssd"]
    answer = admin_pb2.WhyResponse(blocks=2, matched=2, residency=[1, 8])
    daemon.replies["Admin/Why"] = answer
    found = kvctl("why", "--tokens", "1,2,3,4,5,6,7,8", "-o", "json").json
    assert found["residency"] == [["device"], ["tier4"]]
