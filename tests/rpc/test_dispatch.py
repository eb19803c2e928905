"""Where handlers run: what would wait leaves the loop, what need not stays on it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.core.errors import InternalError
from kvstore.rpc import dispatch
from kvstore.rpc.context import CallContext
from kvstore.v1 import leases_pb2
from kvstore.wire.verbs import VERBS, Method

NAME = "kvstore.v1.Leases/RenewLease"
REPLY = leases_pb2.RenewLeaseResponse(ttl_ms=7)


@pytest.fixture
def dispatcher(monkeypatch):
    """A dispatcher whose one method has the handler that a test puts into ``handlers``."""
    handlers = []

    def handle(ctx, request):
        return handlers[0](request)

    request, reply = leases_pb2.RenewLeaseRequest, leases_pb2.RenewLeaseResponse
    method = Method(name=NAME, request=request, reply=reply, serve=handle, session=False)
    monkeypatch.setitem(VERBS, NAME, method)
    made = dispatch.Dispatcher(None, workers=1, waiters=1)
    made.handlers = handlers
    yield made
    made.close()


def start(dispatcher, loop):
    return dispatcher.start(NAME, CallContext(None, None, False, "test"), b"", loop)


def test_a_reply_that_is_there_needs_no_thread(dispatcher):
    threads = []
    dispatcher.handlers.append(lambda _: threads.append(threading.get_ident()) or REPLY)
    assert start(dispatcher, None) is REPLY
    assert threads == [threading.get_ident()]


def test_a_request_that_is_long_leaves_the_loop(dispatcher):
    """4 MiB are not parsed where all others wait; a field that nobody knows is length enough."""
    threads = []
    dispatcher.handlers.append(lambda _: threads.append(threading.get_ident()) or REPLY)
    ctx = CallContext(None, None, False, "test")
    size = dispatch.INLINE_BYTES_MAX
    unknown = b"\x7a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + bytes(size)
    assert asyncio.run(dispatcher.call(NAME, ctx, unknown)) is REPLY
    assert threads != [threading.get_ident()]
    assert asyncio.run(dispatcher.call(NAME, ctx, unknown[:0])) is REPLY
    assert threads[1:] == [threading.get_ident()]


def test_a_handler_that_would_wait_waits_elsewhere(dispatcher):
    done = threading.Event()
    dispatcher.handlers.append(lambda _: lambda: REPLY if done.wait(30) else None)

    async def call():
        reply = start(dispatcher, asyncio.get_running_loop())
        await asyncio.sleep(0)
        assert not reply.done()
        done.set()
        return await asyncio.wait_for(reply, 30)

    assert asyncio.run(call()) is REPLY


def test_what_goes_wrong_while_waiting_is_a_typed_error(dispatcher):
    def fail():
        raise RuntimeError("of the handler")

    async def call():
        return await start(dispatcher, asyncio.get_running_loop())

    dispatcher.handlers.append(lambda _: fail)
    with pytest.raises(InternalError):
        asyncio.run(call())


def test_a_cancelled_call_gives_its_slot_back_whether_it_began_or_not():
    made = dispatch.Dispatcher(None, workers=1, waiters=1)
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    def step():
        begun.set()
        ended.append(go_on.wait(30))

    async def run():
        first = asyncio.create_task(made.work(step))
        second = asyncio.create_task(made.work(lambda: ended.append("never")))
        while not begun.is_set():
            await asyncio.sleep(0)
        assert made.calls()["work"] == 2
        second.cancel()
        await asyncio.wait({second})
        assert (second.cancelled(), made.calls()["work"]) == (True, 1), "no thread had taken it"
        first.cancel()
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert not first.done(), "it runs, so its caller waits before it cleans up"
        go_on.set()
        await asyncio.wait({first})
        assert (first.cancelled(), ended) == (True, [True])

    asyncio.run(run())
    made.close()
    assert not any(made.calls().values())


def test_an_unary_call_cancelled_in_the_queue_takes_no_slot_with_it(dispatcher):
    go_on = threading.Event()
    dispatcher.handlers.append(lambda _: lambda: REPLY if go_on.wait(30) else None)

    async def run():
        loop = asyncio.get_running_loop()
        calls = [asyncio.create_task(asyncio.wait_for(start(dispatcher, loop), 30)) for _ in range(20)]
        await asyncio.sleep(0)
        assert dispatcher.calls()["wait"] == 20
        for call in calls[1:]:
            call.cancel()
        await asyncio.wait(calls[1:])
        assert dispatcher.calls()["wait"] == 1
        go_on.set()
        assert await calls[0] is REPLY

    asyncio.run(run())
