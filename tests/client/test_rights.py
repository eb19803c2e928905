"""However a call ends, what it had taken comes back, and a HIT is proven by the version of its place, not by time."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, Control, aio, sync
from kvstore.client.state import outward
from kvstore.core.errors import DeadlineExceeded
from kvstore.core.types import Area, Outcome, Reason
from kvstore.v1 import admin_pb2
from tests.client.harness import ask, blocks_of, chain, payload, rights, until

HIT, MISS = Outcome.HIT, Outcome.MISS


# ------------------------------------------------------------ proof, not time


class Meanwhile:
    """A copy during which something happens, as if the process had been stopped in it."""

    def __init__(self, monkeypatch, module, action):
        self.copy, self.action = module.copy_all, action
        monkeypatch.setattr(module, "copy_all", self)

    def __call__(self, groups, threads):
        action, self.action = self.action, None
        self.copy(groups, threads)
        if action is not None:
            action()


def own_lease(client):
    """The lease under which the client pins something now."""
    (lease,) = [lease for lease in ask(client, "ListLeases", admin_pb2.ListLeasesResponse).leases if lease.pins]
    return outward(lease.lease_id, client.generation)


@pytest.mark.parametrize("control", list(Control))
def test_a_block_that_went_while_it_was_copied_is_a_miss(daemon, spec, monkeypatch, control):
    with Client(daemon.socket, ClientOptions(buffer_bytes=1 << 20, control=control)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys[:1]))

        versions = client.connection()[0].welcome.arenas.versions[Area.HOST]

        def happen():
            before = list(versions)
            client.release(own_lease(client))
            assert client.remove(opened.namespace_id, keys[:1]) == (HIT,)
            # A write to SSD under way keeps the bytes until it has ended.
            until(lambda: list(versions) != before)

        Meanwhile(monkeypatch, sync, happen)
        got = client.get(opened.namespace_id, keys[:1])
        assert (got.outcomes, got.reasons, got.payloads) == ((MISS,), (Reason.EVICTED,), (None,))
        assert sum(count for name, count in client.failures().items() if name.startswith("Fetch:DEADLINE")) == 1


def test_a_view_says_that_its_block_went(daemon, spec):
    with Client(daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 1)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        with client.get_in_place(opened.namespace_id, keys) as views:
            assert (views.held(), views[0].held()) == (True, True)
            client.release(views.lease.lease_id)
            assert client.remove(opened.namespace_id, keys) == (HIT,)
            until(lambda: not views[0].held())
            assert not views.held()
        assert not views.held()
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        with client.get_in_place(opened.namespace_id, keys) as again:
            assert bytes(again[0].slice(0)) == payload(opened.layout, keys[0])[: opened.layout.slice_bytes]
        assert again.held()


def test_a_strict_client_raises_at_the_end_of_a_view_that_did_not_hold(daemon, spec):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 1)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))

        def look():
            with client.get_in_place(opened.namespace_id, keys) as views:
                client.release(views.lease.lease_id)
                client.remove(opened.namespace_id, keys)
                until(lambda: not views.held())

        with pytest.raises(DeadlineExceeded):
            look()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_the_lease_of_an_open_view_is_renewed(daemon, spec, kind):
    options = ClientOptions(strict=True, buffer_bytes=1 << 20, lease_ttl_ms=300)
    renewed = threading.Event()

    def watch(client):
        renew = client.flows.gets.renew_views

        def noted(views):
            before = views.lease.renewed
            yield from renew(views)
            if views.lease.renewed > before:
                renewed.set()

        client.flows.gets.renew_views = noted

    async def asynchronous():
        async with AsyncClient(daemon.socket, options) as client:
            watch(client)
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 1)
            await client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            async with client.get_in_place(opened.namespace_id, keys) as views:
                await asyncio.to_thread(renewed.wait, 20)
            return views.held()

    if kind == "asyncio":
        assert asyncio.run(asynchronous())
    else:
        with Client(daemon.socket, options) as client:
            watch(client)
            opened = client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 1)
            client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            with client.get_in_place(opened.namespace_id, keys) as views:
                assert renewed.wait(20)
            assert views.held()
    assert renewed.is_set()


# ------------------------------------------------------------ what a call had taken


@pytest.mark.parametrize("control", list(Control))
def test_a_get_that_ends_before_its_blocks_are_there_leaves_no_pin(ssd_daemon, spec, control):
    with Client(ssd_daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, control=control)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 40)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        client.flush()
        request = admin_pb2.EvictRequest(tier=2, bytes=16 << 20)
        client.connection()[0].call("kvstore.v1.Admin/Evict", request.SerializeToString(), 10.0)
        for _ in range(5):
            client.get(opened.namespace_id, keys, wait_ms=0)
        until(lambda: rights(client)[0] == 0)


@pytest.mark.parametrize("control", list(Control))
def test_answers_that_come_too_late_are_undone(daemon, watcher, spec, control):
    options = ClientOptions(buffer_bytes=1 << 20, timeout_s=0.2, control=control, name="hasty")
    with Client(daemon.socket, options) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 6)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys[:2]))
        client.get(opened.namespace_id, keys[:2])
        before = ask(watcher, "ListLeases", admin_pb2.ListLeasesResponse)
        os.kill(daemon.pid, 19)
        try:
            assert client.get(opened.namespace_id, keys[:2]).outcomes == (MISS, MISS)
            assert MISS in client.put(opened.namespace_id, blocks_of(opened.layout, keys)).outcomes
            assert not client.grant_lease("late", 600_000)
        finally:
            os.kill(daemon.pid, 18)
        client.match(opened.namespace_id, keys)

        def quiet():
            client.match(opened.namespace_id, keys)
            now = ask(watcher, "ListLeases", admin_pb2.ListLeasesResponse)
            mine = [session for session in now.sessions if session.owner == "hasty"]
            return (
                len(now.leases) <= len(before.leases)
                and not any(lease.pins for lease in now.leases)
                and mine[0].reservations <= 6
            )

        until(quiet)
        assert client.put(opened.namespace_id, blocks_of(opened.layout, keys)).outcomes == (HIT,) * 6
        assert client.get(opened.namespace_id, keys).outcomes == (HIT,) * 6


def cancelled_once_begun(module, monkeypatch, start):
    """Cancel a call in the middle of its copy; it must come out only when the copy has ended."""
    begun, go_on, ended = threading.Event(), threading.Event(), []
    copy = module.copy_all

    def slow(groups, threads):
        begun.set()
        go_on.wait(30)
        copy(groups, threads)
        ended.append(True)

    async def run(client):
        with monkeypatch.context() as patched:
            patched.setattr(module, "copy_all", slow)
            task = asyncio.create_task(start())
            await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done(), "it still copies"
            go_on.set()
            await asyncio.wait({task})
        assert (task.cancelled(), ended) == (True, [True])

    return run


@pytest.mark.parametrize("control", list(Control))
@pytest.mark.parametrize("call", ["get", "put"])
def test_a_cancelled_call_touches_nothing_afterwards_and_keeps_nothing(
    daemon, watcher, spec, monkeypatch, call, control
):
    async def run():
        async with AsyncClient(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, control=control)) as one:
            opened = await one.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 4)
            blocks = blocks_of(opened.layout, keys)
            if call == "get":
                await one.put(opened.namespace_id, blocks)
            start = (lambda: one.get(opened.namespace_id, keys)) if call == "get" else (
                lambda: one.put(opened.namespace_id, blocks)
            )  # fmt: skip
            standing = rights(watcher)[1]
            await cancelled_once_begun(aio, monkeypatch, start)(one)
            await asyncio.to_thread(until, lambda: rights(watcher) == (0, standing))
            assert (await one.put(opened.namespace_id, blocks)).outcomes == (HIT,) * 4
            assert (await one.get(opened.namespace_id, keys)).outcomes == (HIT,) * 4

    asyncio.run(run())


def test_a_connect_that_is_cancelled_leaves_no_session(daemon, watcher, spec, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    greet = aio.AsyncSessionConnection.open.__globals__["open_session"]

    def slow(*arguments):
        opened = greet(*arguments)
        begun.set()
        go_on.wait(30)
        return opened

    def sessions():
        return [s.owner for s in ask(watcher, "ListLeases", admin_pb2.ListLeasesResponse).sessions]

    async def run():
        monkeypatch.setitem(aio.AsyncSessionConnection.open.__globals__, "open_session", slow)
        client = AsyncClient(daemon.socket, ClientOptions(name="fickle", buffer_bytes=1 << 20))
        task = asyncio.create_task(client.connect())
        await asyncio.to_thread(begun.wait, 30)
        assert "fickle" in await asyncio.to_thread(sessions)
        task.cancel()
        await asyncio.wait({task})
        go_on.set()
        await asyncio.to_thread(until, lambda: "fickle" not in sessions())

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_put_larger_than_the_buffer_stores_all_of_it(daemon, spec, kind):
    layout_room = 3

    async def asynchronous(options, spec):
        async with AsyncClient(daemon.socket, options) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 50)
            return (await client.put(opened.namespace_id, blocks_of(opened.layout, keys))).outcomes

    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 16)) as client:
        opened = client.open_namespace(spec)
        room = layout_room * opened.layout.raw_stored_bytes
        options = ClientOptions(strict=True, buffer_bytes=max(room, 1 << 15))
        if kind == "asyncio":
            outcomes = asyncio.run(asynchronous(options, spec))
        else:
            with Client(daemon.socket, options) as other:
                other.open_namespace(spec)
                keys, _ = chain(opened.namespace_id, 50)
                outcomes = other.put(opened.namespace_id, blocks_of(opened.layout, keys)).outcomes
        assert outcomes == (HIT,) * 50
        keys, _ = chain(opened.namespace_id, 50)
        assert client.match(opened.namespace_id, keys).matched == 50


def test_many_gets_at_once_wait_for_their_turn(ssd_daemon, spec):
    async def run():
        async with AsyncClient(ssd_daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 8)
            await client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            await client.flush()
            request = admin_pb2.EvictRequest(tier=2, bytes=16 << 20).SerializeToString()
            await (await client.connection())[0].call("kvstore.v1.Admin/Evict", request, 10.0)
            gots = await asyncio.gather(*[client.get(opened.namespace_id, keys) for _ in range(200)])
            assert {got.outcomes for got in gots} == {(HIT,) * 8}

    asyncio.run(run())
