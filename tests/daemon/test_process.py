"""The process: ready, told what it got, refused twice, stopped in order, replaced after kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client import Client, ClientOptions
from kvstore.core.types import Outcome
from kvstore.daemon import daemon as daemon_module
from kvstore.daemon.build import build_tiers
from kvstore.daemon.config import Config
from kvstore.daemon.daemon import Daemon
from kvstore.v1 import admin_pb2
from kvstore.wire.paths import grpc_socket
from tests.client.harness import DaemonProcess, blocks_of, chain, leftovers, small_spec, until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    process = DaemonProcess(folder, "--ssd=64MiB", f"--ssd-dir={folder / 'ssd'}")
    process.start()
    yield process
    process.stop()


def test_the_log_says_what_it_got(daemon):
    text = "".join(daemon.lines)
    for part in ("DEVICE: 4 MiB", "HOST: 16 MiB", "recovery: 0 blocks", f"pid {daemon.pid}", str(daemon.socket)):
        assert part in text
    assert all(line[:4].isdigit() for line in daemon.lines)


def test_sockets_are_private(daemon):
    for path in (daemon.socket, grpc_socket(daemon.socket)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def start_another(*arguments):
    command = [sys.executable, "-m", "kvstore.daemon.main", "--device=0", "--host=1MiB", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_a_second_daemon_on_the_socket_is_refused(daemon):
    other = start_another(f"--socket={daemon.socket}")
    assert other.returncode == 1
    assert f"another kvstored (pid {daemon.pid}) serves at {daemon.socket}" in other.stderr
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        assert client.grant_lease("still there", 1000)


def test_a_second_daemon_on_the_directory_is_refused(daemon, tmp_path):
    ssd = daemon.folder / "ssd"
    other = start_another(f"--socket={tmp_path / 'other.sock'}", "--ssd=64MiB", f"--ssd-dir={ssd}")
    assert other.returncode == 1
    assert str(daemon.pid) in other.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_check_says_what_a_start_would(daemon, tmp_path):
    """With the same exit code, and without a daemon's locks being touched."""
    ssd = daemon.folder / "ssd"
    long = tmp_path / ("s" * 120)
    for arguments, text in (
        ([f"--socket={daemon.socket}"], f"another kvstored (pid {daemon.pid}) serves at {daemon.socket}"),
        (
            [f"--socket={tmp_path / 's'}", "--ssd=64MiB", f"--ssd-dir={ssd}"],
            f"another kvstored (pid {daemon.pid}) holds",
        ),
        ([f"--socket={long}"], "at most 107 bytes"),
    ):
        checked, started = start_another(*arguments, "--check"), start_another(*arguments)
        assert (checked.returncode, started.returncode) == (1, 1)
        assert text in checked.stdout
        assert text in started.stderr
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        assert client.grant_lease("still there", 1000)


@pytest.mark.parametrize(
    ("key", "flags"),
    [("socket", ["--socket=/proc/s"]), ("ssd_dir", ["--socket={}/s", "--ssd=64MiB", "--ssd-dir=/proc/ssd"])],
)
def test_a_start_that_the_system_refuses_names_the_key(tmp_path, key, flags):
    ended = start_another(*(flag.format(tmp_path) for flag in flags))
    assert ended.returncode == 1
    assert f"not started, or ended: {key}: [Errno 2]" in ended.stderr
    assert "stopped" not in ended.stderr


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path):
    path = tmp_path / "precious"
    path.write_text("not ours")
    assert start_another(f"--socket={path}").returncode == 1
    assert path.read_text() == "not ours"


def test_a_hang_up_is_logged_and_nothing_else(daemon):
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: any("SIGHUP: policy and certificate are read again" in line for line in daemon.lines))
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        assert client.grant_lease("served", 1000)


def test_signals_during_the_start_end_it_in_order(tmp_path, monkeypatch):
    """A recovery may take minutes: a hang-up is logged, and who stops the daemon then waits for no more than that."""
    config = Config(socket=tmp_path / "kvstored.sock", device=0, host="1 MiB", ssd="16 MiB", ssd_dir=tmp_path / "ssd")

    def build_and_be_signalled(*given):
        built = build_tiers(*given)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        return built

    ready, unhandled = [], []
    monkeypatch.setattr(daemon_module, "build_tiers", build_and_be_signalled)
    # In the place of the kernel's own handlers, which would end this process.
    usual = {n: signal.signal(n, lambda n, _: unhandled.append(n)) for n in (signal.SIGHUP, signal.SIGTERM)}
    try:
        daemon = Daemon(config, on_ready=lambda: (ready.append(True), daemon.stop()))
        asyncio.run(daemon.run())
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert not unhandled
    assert not ready
    assert not config.socket.exists()
    assert not (tmp_path / "kvstored.sock.lock").exists()


def test_turns_of_the_loop_are_counted(daemon):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        reply = client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0)
    counters = admin_pb2.StatusResponse.FromString(reply).counters
    assert counters["loop_turn_longest_us"] > 0
    assert counters["loop_turns_over_50_ms"] <= counters["loop_turns_over_1_ms"]


def test_health_and_reflection(daemon):
    with grpc.insecure_channel(f"unix:{grpc_socket(daemon.socket)}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.Cache", "kvstore.v1.Admin"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = next(stub.ServerReflectionInfo(asked, timeout=10)).list_services_response
        assert {f"kvstore.v1.{name}" for name in ("Cache", "Leases", "Sessions", "Admin", "Events")} <= {
            service.name for service in listed.service
        }


def test_a_client_that_never_says_hello_is_dropped_and_others_are_served(daemon):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.connect(str(daemon.socket))
        with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
            assert client.grant_lease("served", 1000)


@pytest.mark.parametrize("data", [b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(4096)])
def test_noise_ends_its_connection_only(daemon, data):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as noisy:
        noisy.settimeout(20)
        noisy.connect(str(daemon.socket))
        noisy.sendall(data)
        while noisy.recv(65536):
            continue
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        assert client.grant_lease("served", 1000)


def test_sigterm_writes_what_is_in_memory_and_leaves_nothing(tmp_path):
    files = leftovers()
    process = DaemonProcess(tmp_path, "--ssd=64MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    process.start()
    with Client(process.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(small_spec())
        keys, _ = chain(opened.namespace_id, 8)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        assert process.stop() == 0
        assert [path.name for path in tmp_path.iterdir()] == ["ssd"]
        assert leftovers() == files
        process.start()
        assert client.wait_ready(20)
        assert client.match(opened.namespace_id, keys).matched == 8
        assert client.get(opened.namespace_id, keys).outcomes == (Outcome.HIT,) * 8
    assert any("recovery: 8 blocks" in line for line in process.lines)
    process.kill()
    assert process.socket.exists()
    process.start()
    assert process.stop() == 0
    assert os.listdir(tmp_path) == ["ssd"]


def test_sigterm_waits_for_no_operator(tmp_path):
    """A verify at one byte a second, whose caller still waits for it, would else take days."""
    process = DaemonProcess(tmp_path, "--no-grpc", "--drain-timeout-s=1")
    process.start()
    with Client(process.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(small_spec())
        keys, _ = chain(opened.namespace_id, 4)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        slow = admin_pb2.VerifyRequest(bytes_per_second=1).SerializeToString()
        client.connection()[0].send("kvstore.v1.Admin/Verify", slow, 60.0)
        assert client.grant_lease("answered after the verify had begun", 1000)
        assert process.stop() == 0
