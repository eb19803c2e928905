"""A session that ends while a call is under way in another thread, and leases granted shorter than asked."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import grpc
import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, Control
from kvstore.core.errors import Unavailable
from tests.client.harness import DaemonProcess, blocks_of, chain, small_spec

LONG_S = 30.0


class Around:
    """A socket or poll whose one method is another; all else is the original's."""

    def __init__(self, inner, **methods):
        self._inner = inner
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def own_daemon(tmp_path):
    process = DaemonProcess(tmp_path)
    process.start()
    yield process
    process.stop()


def test_close_returns_while_another_thread_waits_for_a_reply(own_daemon):
    client = Client(own_daemon.socket, ClientOptions(strict=True, buffer_bytes=0, timeout_s=LONG_S))
    namespace_id = client.open_namespace(small_spec()).namespace_id
    link, waits, got = client.connection()[0], threading.Event(), []
    poll = link._reads.poll
    link._reads = Around(link._reads, poll=lambda timeout_ms: (waits.set(), poll(timeout_ms))[1])

    def call():
        try:
            client.match(namespace_id, [bytes(32)])
        except Unavailable as error:
            got.append(error)

    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        assert waits.wait(LONG_S)
        closer = threading.Thread(target=client.close, daemon=True)
        closer.start()
        closer.join(LONG_S / 3)
        caller.join(LONG_S / 3)
    finally:
        os.kill(own_daemon.pid, signal.SIGCONT)
    assert (closer.is_alive(), caller.is_alive(), len(got)) == (False, False, 1)


def test_a_reply_that_came_before_the_session_ended_is_answered(daemon):
    with Client(daemon.socket, ClientOptions(buffer_bytes=0)) as client:
        namespace_id = client.open_namespace(small_spec()).namespace_id
        link = client.connection()[0]
        recv = link._socket.recv

        def received(nbytes):
            data = recv(nbytes)
            link._end("another thread found the connection broken")
            return data

        link._socket = Around(link._socket, recv=received)
        assert client.match(namespace_id, [bytes(32)]).matched == 0
        assert client.failures() == {}


def test_a_lease_granted_shorter_than_asked_is_taken_as_granted(tmp_path):
    process = DaemonProcess(tmp_path, "--lease-ttl-max-s=5")
    process.start()
    try:
        with Client(process.socket, ClientOptions(strict=True, lease_ttl_ms=60_000)) as client:
            opened = client.open_namespace(small_spec())
            keys, _ = chain(opened.namespace_id, 2)
            client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            with client.get_in_place(opened.namespace_id, keys) as views:
                assert views.lease.ttl_s == 5
    finally:
        process.stop()


def test_close_ends_the_links_of_connects_that_were_cancelled(daemon):
    """A loop that ends right after ``close`` would cancel the ends of links before they begin."""

    async def run():
        client = AsyncClient(daemon.socket, ClientOptions(control=Control.GRPC, buffer_bytes=0))
        await client.open_namespace(small_spec())
        links = set(client._links)
        for _ in range(3):
            client.flows.drop()
            connecting = asyncio.create_task(client.connect())
            while client._links <= links:
                await asyncio.sleep(0)
            links |= client._links
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        await client.close()
        return [link._channel.get_state() for link in links]

    assert asyncio.run(run()) == [grpc.ChannelConnectivity.SHUTDOWN] * 4
