"""The asyncio client does what the synchronous one does, over every transport."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading

import pytest

from kvstore.client import AsyncClient, Backoff, Client, ClientOptions, Control
from kvstore.core.errors import DeadlineExceeded, InvalidArgument, Unavailable, UnknownLease
from kvstore.core.types import Area, LeaseId, Outcome, Reason, Target
from kvstore.v1 import session_pb2
from kvstore.wire.framing import FrameKind, pack_frame
from tests.client.harness import DaemonProcess, blocks_of, chain, payload, small_spec

_salts = itertools.count()


@pytest.fixture(params=["socket", "grpc", "remote"])
def make(request, daemon):
    def build(**more):
        if request.param == "remote":
            return AsyncClient(f"grpc://127.0.0.1:{daemon.port}", ClientOptions(strict=True, **more))
        control = Control.GRPC if request.param == "grpc" else Control.SOCKET
        return AsyncClient(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, control=control, **more))

    return build


@pytest.fixture
def spec():
    return small_spec(salt=f"async {next(_salts)}".encode())


def test_put_match_get(make, spec):
    async def run():
        async with make() as client:
            opened = await client.open_namespace(spec)
            keys, tokens = chain(opened.namespace_id, 5)
            stored = await client.put(opened.namespace_id, blocks_of(opened.layout, keys, token_ids=tokens))
            assert stored.outcomes == (Outcome.HIT,) * 5
            assert (await client.match(opened.namespace_id, keys)).matched == 5
            got = await client.get(opened.namespace_id, [*keys, bytes([3]) * 32])
            assert got.outcomes == (*(Outcome.HIT,) * 5, Outcome.MISS)
            assert [bytes(part) for part in got.payloads[:5]] == [payload(opened.layout, key) for key in keys]
            with pytest.raises(UnknownLease):
                await client.renew_lease(LeaseId(999))
            with pytest.raises(InvalidArgument):
                await client.match(opened.namespace_id, [bytes(31)])

    asyncio.run(run())


def test_many_calls_at_once(make, spec):
    async def run():
        async with make() as client:
            namespace = (await client.open_namespace(spec)).namespace_id
            keys, _ = chain(namespace, 3)
            found = await asyncio.gather(*(client.match(namespace, keys) for _ in range(50)))
            assert {answer.reason for answer in found} == {Reason.NEVER_STORED}

    asyncio.run(run())


def test_jobs_and_places(daemon, spec):
    async def run():
        async with AsyncClient(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 2)
            await client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            lease = await client.grant_lease("job", 30_000)
            started = await client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease)
            done = await client.wait_job(started.job_id, 20_000)
            assert done.outcomes == (Outcome.HIT,) * 2
            assert {place.area for place in done.places} == {Area.BUFFER}
            assert await client.poll() == []
            async with client.get_in_place(opened.namespace_id, keys) as views:
                got = b"".join(bytes(views[1].slice(layer)) for layer in range(3))
            assert got == payload(opened.layout, keys[1])

    asyncio.run(run())


def test_a_killed_daemon_is_a_miss_then_hits_again(tmp_path, spec):
    process = DaemonProcess(tmp_path, "--ssd=64MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    process.start()

    async def run():
        options = ClientOptions(buffer_bytes=1 << 20, backoff=Backoff(first_s=0.01, last_s=0.05))
        async with AsyncClient(process.socket, options) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 3)
            await client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            await client.flush()
            process.kill()
            assert (await client.match(opened.namespace_id, keys)).matched == 0
            assert (await client.get(opened.namespace_id, keys)).outcomes == (Outcome.MISS,) * 3
            lost = await client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            assert lost.outcomes == (Outcome.MISS,) * 3
            process.start()
            while (await client.match(opened.namespace_id, keys)).matched != 3:
                await asyncio.to_thread(lambda: None)
            got = await client.get(opened.namespace_id, keys)
            assert [bytes(part) for part in got.payloads] == [payload(opened.layout, key) for key in keys]

    asyncio.run(asyncio.wait_for(run(), 30))
    process.stop()


def test_no_daemon(tmp_path):
    async def run():
        client = AsyncClient(tmp_path / "none.sock", ClientOptions(strict=True))
        with pytest.raises(Unavailable):
            await client.connect()
        with pytest.raises(Unavailable) as caught:
            await client.grant_lease("x", 1)
        assert "next attempt" in str(caught.value)
        await client.close()

    asyncio.run(run())


def test_a_deadline_passes(tmp_path):
    """A daemon that greets and then says nothing."""
    with SilentDaemon(tmp_path / "silent.sock") as path:
        with Client(path, ClientOptions(strict=True, timeout_s=0.05)) as client, pytest.raises(DeadlineExceeded):
            client.grant_lease("x", 1000)

        async def run():
            async with AsyncClient(path, ClientOptions(strict=True, timeout_s=0.05)) as client:
                with pytest.raises(DeadlineExceeded):
                    await client.grant_lease("x", 1000)

        asyncio.run(run())


class SilentDaemon:
    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.connections = []
        welcome = session_pb2.Welcome(protocol_version=1, boot_id=bytes(16), token=bytes(32))

        def serve():
            while True:
                try:
                    connection, _ = self.listener.accept()
                except OSError:
                    return
                connection.recv(4096)
                connection.sendall(pack_frame(1, FrameKind.WELCOME, welcome.SerializeToString()))
                self.connections.append(connection)

        self.thread = threading.Thread(target=serve)
        self.thread.start()
        return self.path

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        for connection in self.connections:
            connection.close()
