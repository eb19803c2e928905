"""What takes long ends with its caller, and a stream ends rather than tell bytes that may no longer be the block's."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.core.errors import Unauthenticated, Unavailable
from kvstore.core.types import Outcome, Tier
from kvstore.rpc.context import CallContext, Services
from kvstore.rpc.dispatch import ADMINS, Dispatcher
from kvstore.rpc.sessions import Sessions
from kvstore.rpc.streams import READ_BLOCKS, Streams
from kvstore.testing.world import SPEC, World, slice_of
from kvstore.v1 import admin_pb2, cache_pb2

VERIFY = "kvstore.v1.Admin/Verify"


@pytest.fixture
def world():
    made = World(host_blocks=READ_BLOCKS)
    yield made
    made.close()


@pytest.fixture
def dispatcher(world):
    made = Dispatcher(Services(world.store, Sessions(world.store, world.clock), "test", 1))
    yield made
    made.close()


def context(world, dispatcher):
    return CallContext(dispatcher.services, world.cache, True, "test")


def test_a_verify_with_a_rate_ends_with_its_caller(world, dispatcher):
    """One byte a second would take for ever: the clock of the store stands still."""
    world.put(world.chain(0, 4))

    async def run():
        ctx = context(world, dispatcher)
        request = admin_pb2.VerifyRequest(bytes_per_second=1).SerializeToString()
        call = asyncio.create_task(dispatcher.call(VERIFY, ctx, request))
        while not dispatcher.calls()["admin"]:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while dispatcher.calls()["admin"]:
            await asyncio.sleep(0)
        assert ctx.gone.is_set()

    asyncio.run(run())


def test_operators_never_keep_a_thread_from_a_commit(world, dispatcher):
    world.put(world.chain(0, 4))

    async def run():
        ctx = context(world, dispatcher)
        request = admin_pb2.VerifyRequest(bytes_per_second=1).SerializeToString()
        loop = asyncio.get_running_loop()
        calls = [dispatcher.start(VERIFY, ctx, request, loop) for _ in range(ADMINS + 16)]
        flushed = await dispatcher.call("kvstore.v1.Cache/Flush", context(world, dispatcher), b"")
        assert isinstance(flushed, cache_pb2.FlushResponse)
        assert await dispatcher.work(threading.active_count)
        ctx.gone.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(one) for one in done} == {admin_pb2.VerifyResponse, Unavailable}, "those in the queue never began"

    asyncio.run(run())


def expected(world, key):
    """The payload of a block: its slices, without padding."""
    return b"".join(slice_of(key, layer) for layer in range(SPEC.layers))


def read(world, dispatcher, keys):
    request = cache_pb2.ReadRequest(namespace_id=world.namespace_id, keys=b"".join(keys))
    return Streams(dispatcher).read(context(world, dispatcher), request)


def test_a_reader_may_pause_as_long_as_its_stream_lives(world, dispatcher):
    """Its pins have no clock: others find no room meanwhile, and it goes on with the bytes of its own blocks."""
    keys = world.chain(0, READ_BLOCKS)
    world.put(keys)

    async def run():
        stream = read(world, dispatcher, keys)
        chunks = [await anext(stream)]
        for turn in range(1, 12):
            world.clock.advance(60)
            world.store.tick()
            assert world.put(world.chain(turn, READ_BLOCKS)).outcomes[0] is Outcome.BUSY
        assert world.store.leases()[0].seconds_left == 0
        chunks += [chunk async for chunk in stream]
        assert [bytes(chunk.data) for chunk in chunks] == [expected(world, key) for key in keys]
        assert not world.store.leases()

    asyncio.run(run())


def test_a_stream_whose_pins_were_given_up_ends_with_a_status(world, dispatcher):
    """Whoever guesses the number of the stream's lease gains nothing by it: each chunk is proven after its copy."""
    keys = world.chain(0, READ_BLOCKS)
    world.put(keys)

    async def run():
        stream = read(world, dispatcher, keys)
        assert (await anext(stream)).outcome == int(Outcome.HIT)
        world.cache.release(world.store.leases()[0].lease_id, world.namespace_id, keys)
        world.put(world.chain(1, READ_BLOCKS))
        assert world.cache.match(world.namespace_id, keys).matched < READ_BLOCKS
        with pytest.raises(Unavailable, match="no longer kept"):
            await anext(stream)
        assert not world.store.leases()

    asyncio.run(run())


def test_a_stream_ends_with_its_session(world, dispatcher):
    keys = world.chain(0, 2)
    world.put(keys)

    async def run():
        stream = read(world, dispatcher, keys)
        await anext(stream)
        world.cache.close()
        assert not world.store.leases()
        with pytest.raises(Unauthenticated):
            await anext(stream)

    asyncio.run(run())


def test_a_reader_that_goes_away_leaves_no_pin(world, dispatcher):
    keys = world.chain(0, 2)
    world.put(keys)

    async def run():
        request = cache_pb2.ReadRequest(namespace_id=world.namespace_id, keys=b"".join(keys))
        stream = Streams(dispatcher).read(context(world, dispatcher), request)
        await anext(stream)
        await stream.aclose()
        assert not world.store.leases()
        assert world.cache.remove(world.namespace_id, keys) == (Outcome.HIT,) * 2
        assert not world.store.list_blocks(tier=Tier.HOST).blocks

    asyncio.run(run())
