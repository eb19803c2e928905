"""Reading plans through a daemon: over both controls, and whatever becomes of readers and daemon meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, Control
from kvstore.client.plan import Plan, PlanEnded
from kvstore.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from kvstore.core.types import Durability, Outcome, Reason
from kvstore.kernels import native
from kvstore.v1 import admin_pb2
from tests.client.harness import ask, blocks_of, chain, payload, small_spec, until

pytestmark = pytest.mark.skipif(not native.available(), reason="plans are read by native code")

BLOCKS = 60
SMALL = {"piece_bytes": 32768, "pieces": 3}


def options(**more):
    return ClientOptions(**{"strict": True, "buffer_bytes": 1 << 20, **more})


def store(client, spec):
    opened = client.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, BLOCKS)
    stored = client.put(opened.namespace_id, blocks_of(opened.layout, keys, durability=Durability.DURABLE))
    assert set(stored.outcomes) == {Outcome.HIT}
    return opened, keys


def read(plan, opened, keys):
    """One pass, every slice compared; how many slices came."""
    nbytes, came = opened.layout.slice_bytes, 0
    for piece in plan.pieces():
        for row in range(piece.count):
            whole = payload(opened.layout, keys[piece.first + row])
            assert piece.data[row].tobytes() == whole[piece.layer * nbytes : (piece.layer + 1) * nbytes]
            came += 1
    return came


def plans_of(watcher):
    """Leases of plans that live, and what they pin."""
    leases = ask(watcher, "ListLeases", admin_pb2.ListLeasesResponse).leases
    return [lease.pins for lease in leases if lease.name == "reading plan"]


@pytest.mark.parametrize("control", list(Control))
def test_slices_come_right_pass_after_pass(daemon, spec, watcher, control):
    with Client(daemon.socket, options(control=control)) as client:
        opened, keys = store(client, spec)
        with client.plan(opened.namespace_id, keys, **SMALL) as plan:
            assert plans_of(watcher) == [BLOCKS]
            for _ in range(3):
                assert read(plan, opened, keys) == BLOCKS * opened.layout.layers
                plan.restart()
        assert plans_of(watcher) == []


def test_a_ring_that_does_not_fit_is_refused_with_what_is_free_or_misses(daemon, spec):
    with Client(daemon.socket, options()) as client:
        opened, keys = store(client, spec)
        with pytest.raises(ResourceExhausted, match="does not fit"):
            client.plan(opened.namespace_id, keys, piece_bytes=1 << 20, pieces=2)
    with Client(daemon.socket, options(strict=False)) as client:
        client.open_namespace(spec)
        with client.plan(opened.namespace_id, keys, piece_bytes=1 << 20, pieces=2) as plan:
            assert not plan.keys_mask.any()
            assert list(plan.pieces()) == []


def test_clients_without_a_buffer_and_remote_ones_are_refused(daemon, spec):
    with Client(daemon.socket, options()) as client:
        opened, keys = store(client, spec)
        with Client(daemon.socket, options(buffer_bytes=0)) as bare:
            bare.open_namespace(spec)
            with pytest.raises((InvalidArgument, Unavailable)):
                bare.plan(opened.namespace_id, keys, **SMALL)
        with Client(f"grpc://127.0.0.1:{daemon.port}", options()) as far:
            far.open_namespace(spec)
            with pytest.raises(InvalidArgument, match="buffer"):
                far.plan(opened.namespace_id, keys, **SMALL)


READER = """
import sys
from kvstore.client import Client, ClientOptions
from kvstore.core.types import Durability
from tests.client.harness import chain, small_spec
salt = bytes.fromhex(sys.argv[2])
client = Client(sys.argv[1], ClientOptions(strict=True, buffer_bytes=1 << 20))
opened = client.open_namespace(small_spec(salt=salt))
keys, _ = chain(opened.namespace_id, 60)
plan = client.plan(opened.namespace_id, keys, piece_bytes=32768, pieces=3, idle_ms=int(sys.argv[3]))
piece = next(plan.pieces(keep=True))
print("reads", piece.count, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("number", "idle_ms"), [(signal.SIGKILL, 600_000), (signal.SIGSTOP, 1_000)])
def test_a_reader_that_is_killed_or_stopped_holds_nothing(daemon, spec, watcher, number, idle_ms):
    with Client(daemon.socket, options()) as client:
        store(client, spec)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(daemon.socket), spec.salt.hex(), str(idle_ms)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert reader.stdout.readline().startswith("reads")
            assert plans_of(watcher) == [BLOCKS]
            os.kill(reader.pid, number)
            until(lambda: plans_of(watcher) == [])
        finally:
            reader.kill()
            reader.communicate()


def test_two_readers_at_once_and_one_that_rests(daemon, spec):
    """A reader that gives nothing back keeps nobody else from reading."""
    with Client(daemon.socket, options()) as client, Client(daemon.socket, options()) as other:
        opened, keys = store(client, spec)
        other.open_namespace(spec)
        with (
            other.plan(opened.namespace_id, keys, **SMALL) as resting,
            client.plan(opened.namespace_id, keys, **SMALL) as plan,
        ):
            next(resting.pieces(keep=True))
            for _ in range(3):
                assert read(plan, opened, keys) == BLOCKS * opened.layout.layers
                plan.restart()
            resting.restart()
            assert read(resting, opened, keys) == BLOCKS * opened.layout.layers


def test_the_daemon_killed_under_a_plan_ends_it_and_a_new_one_reads_on(ssd_daemon):
    spec = small_spec(salt=b"killed")
    with Client(ssd_daemon.socket, options()) as client:
        opened, keys = store(client, spec)
        plan = client.plan(opened.namespace_id, keys, **SMALL)
        pieces = plan.pieces()
        next(pieces)
        ssd_daemon.kill()
        with pytest.raises(PlanEnded) as ended:
            for _ in pieces:
                pass
        assert ended.value.why is Reason.TIER_UNAVAILABLE
        plan.close()
        ssd_daemon.start()
        assert client.wait_ready(20)
        with client.plan(opened.namespace_id, keys, **SMALL) as again:
            assert again.keys_mask.all()
            assert read(again, opened, keys) == BLOCKS * opened.layout.layers


def test_the_asyncio_client_has_the_calls(daemon, spec):
    async def calls():
        async with AsyncClient(daemon.socket, options()) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 4)
            await client.put(opened.namespace_id, blocks_of(opened.layout, keys, durability=Durability.DURABLE))
            plan = await client.open_plan(opened.namespace_id, keys, **SMALL)
            assert set(plan.keys.outcomes) == {Outcome.HIT}
            assert (await client.advance_plan(plan.plan_id)).pieces > 0
            assert await client.close_plan(plan.plan_id)
            assert not await client.close_plan(plan.plan_id)

    asyncio.run(calls())


def test_a_plan_over_the_client_is_the_plan_over_any_cache(daemon, spec):
    with Client(daemon.socket, options()) as client:
        opened, keys = store(client, spec)
        with Plan.open(client, opened.namespace_id, keys, **SMALL) as plan:
            assert read(plan, opened, keys) == BLOCKS * opened.layout.layers
