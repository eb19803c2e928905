"""The socket's lock file: only a plain file of ours is ever written. Accepting rests while there are no descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.client.options import Control
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.daemon.config import Config
from kvstore.rpc import listener
from kvstore.rpc.listener import Acceptor, SocketLock, raise_descriptor_limit
from tests.client.harness import daemon_thread


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_a_link_in_place_of_the_lock_file_harms_nothing(tmp_path, link):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link(victim, tmp_path / "s.lock")
    lock = SocketLock(tmp_path / "s")
    assert victim.read_text() == "precious"
    assert (tmp_path / "s.lock").read_text() == str(os.getpid())
    with pytest.raises(Unavailable):
        SocketLock(tmp_path / "s")
    lock.release()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_can_not_be_a_lock_file_is_replaced_or_refused(tmp_path, make):
    make(tmp_path / "s.lock")
    if (tmp_path / "s.lock").is_dir():
        with pytest.raises(InvalidArgument, match="plain file"):
            SocketLock(tmp_path / "s")
    else:
        SocketLock(tmp_path / "s").release()


def test_a_lock_that_a_dead_daemon_left_is_taken(tmp_path):
    (tmp_path / "s.lock").write_text("999999999")
    SocketLock(tmp_path / "s").release()
    assert not (tmp_path / "s.lock").exists()


class Scarce:
    """A listening socket whose ``accept`` fails as often as a test says."""

    def __init__(self, real, failures):
        self.real, self.failures, self.accepts = real, failures, 0

    def fileno(self):
        return self.real.fileno()

    def close(self):
        self.real.close()

    def accept(self):
        self.accepts += 1
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.real.accept()


def test_out_of_descriptors_accepting_rests_and_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(listener, "ACCEPT_PAUSE_S", 0.001)

    async def run():
        scarce = Scarce(listener.bind_unix(tmp_path / "s", 0o600), failures=5)
        came = asyncio.Queue()
        acceptor = Acceptor(scarce, came.put_nowait)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            (await came.get()).close()
        assert (acceptor.pauses, scarce.accepts) == (5, 7), "one try a pause, then the connection and a look for more"
        acceptor.close()
        acceptor.close()

    asyncio.run(run())
    told = [record.getMessage() for record in caplog.records if "no connection is accepted" in record.getMessage()]
    assert len(told) == 1
    assert "LimitNOFILE" in told[0]


def test_all_who_wait_are_taken_in_one_turn(tmp_path):
    async def run():
        bound = listener.bind_unix(tmp_path / "s", 0o600)
        taken = []
        acceptor = Acceptor(bound, taken.append)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for client in clients:
            client.connect(str(tmp_path / "s"))
        acceptor._accept()
        assert len(taken) == 20
        for one in [*clients, *taken]:
            one.close()
        acceptor.close()

    asyncio.run(run())


def test_while_it_rests_the_loop_is_not_called(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "ACCEPT_PAUSE_S", 3600)

    async def run():
        scarce = Scarce(listener.bind_unix(tmp_path / "s", 0o600), failures=1000)
        acceptor = Acceptor(scarce, lambda connection: connection.close())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            while not scarce.accepts:
                await asyncio.sleep(0)
            for _ in range(200):
                await asyncio.sleep(0)
        assert scarce.accepts == 1
        acceptor.close()

    asyncio.run(run())


def test_the_soft_limit_of_descriptors_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert raise_descriptor_limit() == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", [b"a%20b", b"a#b", b"a?b=c", b"caf\xe9", "caf\u00e9".encode(), b"a b&c"])
def test_a_socket_path_may_hold_what_a_path_may_hold(tmp_path, name):
    """gRPC reads a URI where the session socket has a path: both lead to the same daemon."""
    folder = tmp_path / os.fsdecode(name)
    config = Config(socket=folder / "k.sock", device=0, host="1 MiB")
    options = ClientOptions(strict=True, buffer_bytes=0, control=Control.GRPC)
    with daemon_thread(config), Client(config.socket, options) as client:
        assert client.grant_lease("over gRPC", 1000)
        assert {path.name for path in folder.iterdir()} >= {"k.sock", "k.sock.grpc"}
