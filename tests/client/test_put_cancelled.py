"""A put that is cancelled while it waits for its commit: its places come back once, by way of the late reply."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvstore.client import AsyncClient, ClientOptions
from kvstore.client.flow_put import _Put, _Sent
from kvstore.client.session_connection import CALLS_MAX
from kvstore.core.types import Outcome
from kvstore.v1 import admin_pb2
from tests.client.harness import blocks_of, chain, small_spec


def test_places_of_a_commit_that_was_waited_for_come_back_once():
    forgotten = []
    link = SimpleNamespace(generation=0, forget=lambda *args: forgotten.append(args))
    flows = SimpleNamespace(options=SimpleNamespace(timeout_s=1.0, buffer_bytes=1 << 20), puts=None)
    put = _Put(flows, b"n" * 32, SimpleNamespace(places_max=lambda _: 4))
    put._sent = _Sent(link, 7, SimpleNamespace(method="Cache/Commit"), ["a place"])
    waiting = put._take_in()
    step = next(waiting)
    with pytest.raises(asyncio.CancelledError):
        waiting.throw(asyncio.CancelledError())
    put.give_back()
    # Whoever carries out the wait has been given ``late``; a second one would settle the same places again.
    assert step.late is not None
    assert forgotten == []


def test_a_put_cancelled_while_its_commit_waits_for_its_turn_gives_its_places_back(daemon):
    spec = small_spec(salt=b"cancelled in the queue")

    async def run():
        async with AsyncClient(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, name="queues")) as one:
            opened = await one.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 4)
            blocks = blocks_of(opened.layout, keys)
            await one.put(opened.namespace_id, blocks)
            link = one.flows.link
            for _ in range(CALLS_MAX):
                await link._slots.acquire()
            task = asyncio.create_task(one.put(opened.namespace_id, blocks))
            while not link._slots._waiters:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            for _ in range(CALLS_MAX):
                link._slots.release()
            assert (await one.put(opened.namespace_id, blocks)).outcomes == (Outcome.HIT,) * 4
            reply = await link.call("kvstore.v1.Admin/ListLeases", b"", 10.0)
            sessions = admin_pb2.ListLeasesResponse.FromString(reply).sessions
            assert [s.reservations for s in sessions if s.owner == "queues"] == [4]

    asyncio.run(run())
