"""Sessions end when they should, and every queue of a session and of the daemon has a bound."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import socket
import struct
import threading
from types import SimpleNamespace

import grpc
import pytest

from kvstore.client import Client, ClientOptions, handshake
from kvstore.client.grpc_errors import domain_error
from kvstore.client.handshake import Hello, open_session
from kvstore.core.errors import (
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    UnknownLease,
)
from kvstore.core.types import Area, SessionId
from kvstore.rpc import handlers_admin, session_server
from kvstore.rpc.arenas import ArenaExport
from kvstore.rpc.context import CallContext, Services
from kvstore.rpc.dispatch import check_rights
from kvstore.rpc.listener import PeerCredentials, SocketLock, bind_unix, check_socket_path
from kvstore.rpc.pool import BoundedPool
from kvstore.rpc.session_server import SessionServer, SocketOptions
from kvstore.rpc.table import METHODS
from kvstore.store.tables import buffers
from kvstore.testing.world import World
from kvstore.v1 import admin_pb2, leases_pb2, session_pb2
from kvstore.wire.framing import PROTOCOL_VERSION, FrameDecoder, FrameKind, pack_frame
from tests.client.harness import until


class Far:
    """A remote session by hand, which keeps itself alive only when told to."""

    def __init__(self, daemon, ttl_ms):
        self.channel = grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}")
        self.token = ""
        request = session_pb2.OpenRemoteRequest(name="far", ttl_ms=ttl_ms)
        opened = session_pb2.OpenRemoteResponse.FromString(self.call("Sessions/OpenRemote", request))
        self.token, self.ttl_ms = opened.token.hex(), opened.ttl_ms

    def call(self, name, request):
        metadata = (("kvstore-session", self.token),) if self.token else ()
        call = self.channel.unary_unary(f"/kvstore.v1.{name}")
        try:
            return call(request.SerializeToString(), timeout=10.0, metadata=metadata)
        except grpc.RpcError as error:
            raise domain_error(error, name, 10.0)[0] from error

    def lease(self):
        reply = self.call("Leases/GrantLease", leases_pb2.GrantLeaseRequest(name="far's", ttl_ms=600_000))
        return leases_pb2.GrantLeaseResponse.FromString(reply).lease_id


@pytest.fixture
def watcher(daemon, config):
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        yield client


def test_a_remote_session_lives_by_keepalive(daemon, config, clock, watcher):
    far = Far(daemon, 10_000)
    lease = far.lease()
    for _ in range(3):
        clock.advance(8.0)
        far.call("Sessions/Keepalive", session_pb2.KeepaliveRequest())
    far.call("Leases/RenewLease", leases_pb2.RenewLeaseRequest(lease_id=lease))
    clock.advance(10.5)
    with pytest.raises(Unauthenticated):
        far.call("Leases/RenewLease", leases_pb2.RenewLeaseRequest(lease_id=lease))
    with pytest.raises(Unauthenticated):
        far.call("Sessions/Keepalive", session_pb2.KeepaliveRequest())

    def owners():
        from_daemon = watcher.connection()[0].call("kvstore.v1.Admin/ListLeases", b"", 10.0)
        return b"far" in from_daemon

    until(lambda: not owners())
    far.channel.close()


def test_a_closed_remote_session_ends_at_once(daemon, config, clock, watcher):
    far = Far(daemon, 600_000)
    lease = far.lease()

    def status():
        return admin_pb2.StatusResponse.FromString(watcher.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0))

    before = status().sessions
    far.call("Sessions/CloseRemote", session_pb2.CloseRemoteRequest())
    assert status().sessions == before - 1
    for name, request in (
        ("Leases/RenewLease", leases_pb2.RenewLeaseRequest(lease_id=lease)),
        ("Sessions/CloseRemote", session_pb2.CloseRemoteRequest()),
    ):
        with pytest.raises(Unauthenticated):
            far.call(name, request)
    far.channel.close()


def test_a_local_session_is_closed_by_its_connection_only(watcher):
    with pytest.raises(InvalidArgument) as caught:
        watcher.connection()[0].call("kvstore.v1.Sessions/CloseRemote", b"", 10.0)
    assert caught.value.field == "kvstore-session"
    assert watcher.grant_lease("still alive", 1000)


def test_a_lease_of_another_session_is_unknown(daemon, config, watcher):
    lease = watcher.grant_lease("mine", 600_000)
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as other, pytest.raises(UnknownLease):
        other.renew_lease(lease)
    watcher.renew_lease(lease)


def test_a_local_session_needs_no_keepalive(watcher):
    with pytest.raises(InvalidArgument):
        watcher.connection()[0].call("kvstore.v1.Sessions/Keepalive", b"", 10.0)


@pytest.mark.parametrize("nbytes", [1, 4095, 1 << 40])
def test_a_buffer_out_of_bounds_is_refused_at_once(config, daemon, nbytes):
    with pytest.raises(InvalidArgument) as caught:
        Client(config.socket, ClientOptions(strict=True, buffer_bytes=nbytes))
    assert caught.value.field == "buffer_bytes"


def test_a_session_without_a_descriptor_left_is_refused_by_name(config, daemon, monkeypatch):
    def fails(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(buffers, "_Counted", fails)
    with pytest.raises(ResourceExhausted) as caught:
        Client(config.socket, ClientOptions(strict=True, buffer_bytes=4096))
    assert "Too many open files" in str(caught.value)


def test_leases_are_listed_in_pages(monkeypatch):
    """16,384 leases with long names are more than a message holds."""
    monkeypatch.setattr(handlers_admin, "LIST_BYTES_MAX", 100)
    world = World(host_blocks=2)
    names = {f"lease {number} {'x' * 40}" for number in range(7)}
    for name in names:
        world.cache.grant_lease(name, 60_000)
    ctx = CallContext(Services(world.store, None, "test", 1), world.cache, True, "test")
    listed, sessions, pages, token = set(), 0, 0, ""
    while token or not pages:
        page = handlers_admin.list_leases(ctx, admin_pb2.ListLeasesRequest(page_token=token))
        listed |= {lease.name for lease in page.leases}
        sessions += len(page.sessions)
        pages, token = pages + 1, page.next_page_token
    assert (listed, sessions) == (names, 1)
    assert pages > 3
    with pytest.raises(InvalidArgument):
        handlers_admin.list_leases(ctx, admin_pb2.ListLeasesRequest(page_token="-1"))
    world.close()


def test_a_pool_refuses_beyond_its_bound():
    pool = BoundedPool("work", threads=1, queue_max=1)
    go, told = threading.Event(), queue.SimpleQueue()

    def tell(answer, error):
        told.put((answer, error))

    for _ in range(2):
        pool.submit(go.wait, tell)
    with pytest.raises(ResourceExhausted) as caught:
        pool.submit(go.wait, tell)
    assert (caught.value.field, caught.value.value) == ("calls", "2")
    go.set()
    assert [told.get(timeout=30) for _ in range(2)] == [(True, None)] * 2
    pool.submit(lambda: 7, tell)
    assert told.get(timeout=30) == (7, None)
    assert pool.close()
    with pytest.raises(Unavailable):
        pool.submit(go.wait, tell)


def test_a_pool_is_closed_without_waiting_for_ever():
    """SIGTERM waits for a call that hangs on a disk no longer than it was told to; what waits behind it is refused."""
    pool = BoundedPool("work", threads=1, queue_max=1)
    begun, go, told = threading.Event(), threading.Event(), []
    pool.submit(lambda: begun.set() or go.wait(), lambda answer, error: told.append(error))
    assert begun.wait(30)
    pool.submit(go.wait, lambda answer, error: told.append(error))
    assert not pool.close(0.0)
    assert [type(error) for error in told] == [Unavailable]
    go.set()
    assert pool.close()


class TestGreetings:
    @pytest.fixture
    def silent(self, config, daemon, monkeypatch):
        monkeypatch.setattr(session_server, "GREETINGS_MAX", 4)
        made = []

        def connect(count):
            for _ in range(count):
                made.append(socket.socket(socket.AF_UNIX))
                made[-1].connect(str(config.socket))
            return made

        yield connect
        for one in made:
            one.close()

    def test_who_says_nothing_makes_room(self, config, silent):
        """The oldest goes, and a client that greets gets its session."""
        first = silent(8)[0]
        with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
            assert client.grant_lease("in", 1000)
        first.settimeout(20)
        assert first.recv(1) == b""

    def test_those_of_the_user_who_has_most_make_room(self, monkeypatch, silent):
        uids = itertools.chain([7], itertools.repeat(8))
        monkeypatch.setattr(session_server, "peer_credentials", lambda _: PeerCredentials(1, next(uids), 1))
        quiet, oldest, *_ = silent(5)
        oldest.settimeout(20)
        assert oldest.recv(1) == b""
        with pytest.raises(BlockingIOError):
            quiet.recv(1, socket.MSG_DONTWAIT)

    def test_who_comes_without_end_fills_no_log(self, tmp_path, caplog):
        server = SessionServer(None, [], SocketOptions(tmp_path / "s"))
        for _ in range(100):
            server._tell_not_opened(PeerCredentials(1, 7, 7), Unavailable("of this test"))
        # Servers of earlier tests may tell of theirs still.
        told = [record.levelname for record in caplog.records if record.getMessage().endswith(": of this test")]
        assert told.count("WARNING") == 7

    def test_a_full_queue_is_waited_for(self, tmp_path, monkeypatch):
        """Linux answers EAGAIN at once to a socket that does not block, so the kernel has to wait, and not Python."""
        path = str(tmp_path / "queue.sock")
        refused, seen = [], []

        class Seen(socket.socket):
            def connect(self, address):
                seen.append((self.gettimeout(), self.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)))
                super().connect(address)

        monkeypatch.setattr(handshake.socket, "socket", Seen)

        def come():
            try:
                open_session(path, Hello("late"), 20.0)
            except Unavailable as error:
                refused.append(str(error))

        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
            listener.bind(path)
            listener.listen(0)
            listener.settimeout(20)
            with contextlib.suppress(BlockingIOError):
                while True:
                    one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                    one.connect(path)
            late = threading.Thread(target=come)
            late.start()
            stack.close()
            greeted = b""
            while not greeted:
                with listener.accept()[0] as taken:
                    greeted = taken.recv(100)
            late.join()
        # It came in behind the others; that this listener gives no Welcome is another matter.
        assert "temporarily unavailable" not in refused[0]
        assert seen[-1] == (None, struct.pack("ll", 20, 0))


@pytest.mark.parametrize("cut", [0, 1, 3, 20])
def test_requests_sent_behind_the_hello_are_answered(config, daemon, cut):
    """A client need not wait for its Welcome; a request of which only half came with the Hello is not lost."""
    hello = session_pb2.Hello(protocol_version=PROTOCOL_VERSION, name="eager").SerializeToString()
    grant = leases_pb2.GrantLeaseRequest(name="x", ttl_ms=1000).SerializeToString()
    request = pack_frame(7, FrameKind.REQUEST, grant, name=b"kvstore.v1.Leases/GrantLease")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(config.socket))
        connection.sendall(pack_frame(1, FrameKind.HELLO, hello) + request[: len(request) - cut])
        decoder, frames = FrameDecoder(), []
        while not frames:
            frames = decoder.feed(connection.recv(4096))
        connection.sendall(request[len(request) - cut :])
        while len(frames) < 2:
            frames += decoder.feed(connection.recv(4096))
    assert [(frame.call_id, frame.kind) for frame in frames] == [(1, FrameKind.WELCOME), (7, FrameKind.REPLY)]


def test_rights():
    admin, data = METHODS["kvstore.v1.Admin/Evict"], METHODS["kvstore.v1.Cache/Match"]
    anybody = CallContext(None, None, False, "test")
    with pytest.raises(PermissionDenied):
        check_rights(admin, anybody)
    with pytest.raises(Unauthenticated):
        check_rights(data, anybody)
    check_rights(admin, CallContext(None, None, True, "test"))
    check_rights(data, CallContext(None, SimpleNamespace(session_id=SessionId(1)), False, "test"))


class TestListener:
    def test_one_lock_a_path(self, tmp_path):
        lock = SocketLock(tmp_path / "s")
        with pytest.raises(Unavailable) as caught:
            SocketLock(tmp_path / "s")
        assert caught.value.value == str(os.getpid())
        lock.release()
        lock.release()
        assert list(tmp_path.iterdir()) == []
        SocketLock(tmp_path / "s").release()

    def test_a_lock_file_without_a_holder_is_taken_over(self, tmp_path):
        (tmp_path / "s.lock").write_text("999999")
        SocketLock(tmp_path / "s").release()

    def test_a_stale_socket_is_replaced_and_nothing_else(self, tmp_path):
        bind_unix(tmp_path / "s", 0o600).close()
        bind_unix(tmp_path / "s", 0o640).close()
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o640
        (tmp_path / "f").write_text("precious")
        with pytest.raises(InvalidArgument):
            bind_unix(tmp_path / "f", 0o600)

    def test_paths_that_can_not_be_bound(self, tmp_path):
        with pytest.raises(InvalidArgument):
            check_socket_path(tmp_path / ("x" * 108))
        with pytest.raises(InvalidArgument):
            bind_unix(tmp_path / "missing" / "s", 0o600)


@pytest.mark.parametrize("after", ["hello", "half a hello", "nothing"])
def test_a_client_that_is_gone_before_its_welcome_leaves_no_session(config, daemon, watcher, after, caplog):
    def sessions():
        reply = watcher.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0)
        return admin_pb2.StatusResponse.FromString(reply).sessions

    before = sessions()
    hello = session_pb2.Hello(protocol_version=PROTOCOL_VERSION, name="hasty", buffer_bytes=1 << 20)
    frame = pack_frame(1, FrameKind.HELLO, hello.SerializeToString())
    for _ in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hasty:
            hasty.connect(str(config.socket))
            hasty.sendall({"hello": frame, "half a hello": frame[:10], "nothing": b""}[after])
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as later:
        assert later.grant_lease("after them", 1000)
    # Those of the test before may have been ending.
    until(lambda: sessions() <= before)
    assert "never retrieved" not in caplog.text, "the greeting's task ends with its connection closed"


def test_memory_that_all_can_write_goes_to_trusted_users_only(tmp_path):
    """DEVICE on a GPU has no read-only form."""
    options = SocketOptions(tmp_path / "s", device_uids=frozenset({0, 7}))
    on_gpu = ArenaExport(Area.DEVICE, 1 << 20, -1, writable=True, kind="cuda-ipc")
    in_memory = ArenaExport(Area.DEVICE, 1 << 20, 99, writable=False)
    hello = session_pb2.Hello(device=True)
    for export, uid, given in ((on_gpu, 7, 1), (on_gpu, 8, 0), (in_memory, 8, 1)):
        server = SessionServer(None, [export], options)
        assert len(server._shared(hello, SimpleNamespace(uid=uid, buffer_fd=-1))) == given
