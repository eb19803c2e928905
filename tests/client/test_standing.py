"""put uses the same places of the buffer again and again, and gives them up to those who need them."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from kvstore.cache import CommitResult, ReserveResult
from kvstore.client import AsyncClient, Client, ClientOptions, sync
from kvstore.client.standing import Standing, StandingPlaces, answered, take_out
from kvstore.client.state import GENERATION_SHIFT
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import Area, NamespaceId, Outcome, Place, Reason, ReservationId, Tier
from kvstore.v1 import admin_pb2
from tests.client.harness import DaemonProcess, blocks_of, chain, payload, small_spec

A, B = NamespaceId(bytes(32)), NamespaceId(bytes([1]) * 32)
LAYOUT = BlockLayout.of(small_spec())
HIT = CommitResult((Outcome.HIT,), (Reason.NONE,), (False,), (None,))
LOST = CommitResult((Outcome.MISS,), (Reason.DROPPED,), (False,), (None,))
_salts = itertools.count()


@pytest.fixture
def spec():
    return small_spec(salt=f"standing {next(_salts)}".encode())


def places(*numbers, generation=1):
    return [
        Standing(ReservationId(generation << GENERATION_SHIFT | n), Place(Area.BUFFER, 4096 * n, 64)) for n in numbers
    ]


def ids(*numbers, generation=1):
    return [place.reservation_id for place in places(*numbers, generation=generation)]


def test_what_is_idle_is_taken_first_come_first_served():
    pool = StandingPlaces()
    assert pool.take(1, A, 2) == []
    assert pool.settle(A, places(1, 2, 3), HIT, 8) == []
    assert pool.take(1, A, 2) == places(1, 2)
    assert pool.take(1, A, 2) == places(3)
    assert pool.take(1, A, 2) == []


def test_no_more_is_kept_than_asked_and_none_of_another_namespace():
    pool = StandingPlaces()
    pool.take(1, A, 1)
    assert pool.settle(A, places(1, 2, 3), HIT, 2) == ids(3)
    assert pool.take(1, B, 5) == []
    assert pool.settle(B, places(4), HIT, 2) == ids(1, 2)
    assert pool.spare(B) == []
    assert pool.spare(A) == ids(4)
    assert pool.take(1, B, 1) == []


def test_places_of_a_lost_connection_are_forgotten():
    pool = StandingPlaces()
    pool.take(1, A, 1)
    pool.settle(A, places(1, 2), HIT, 8)
    assert pool.take(2, A, 2) == []
    assert pool.settle(A, places(3), HIT, 8) == []
    assert pool.take(2, A, 2) == []


def test_places_without_an_answer_are_not_used_again_but_aborted_when_room_is_short():
    pool = StandingPlaces()
    pool.take(1, A, 1)
    assert pool.settle(A, places(1), LOST, 8) == []
    assert pool.take(1, A, 1) == []
    assert pool.spare(A) == ids(1)
    assert pool.spare(A) == []


def test_places_of_an_answer_are_those_that_were_reserved():
    reserved = ReserveResult(
        (Outcome.PENDING, Outcome.BUSY), (ReservationId(5), ReservationId(0)), (places(1)[0].place, None)
    )
    found, out = answered(reserved), {}
    assert [place.reservation_id for place in found] == [5]
    take_out(out, found)
    assert out == {5: found[0]}


def test_a_commit_that_is_refused_gives_its_places_back(daemon, spec):
    with Client(str(daemon.socket), ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 3)
        blocks = blocks_of(LAYOUT, keys)
        wrong = replace(blocks, token_ids=[1] * (3 * 16))
        for _ in range(30):
            with pytest.raises(InvalidArgument):
                client.put(opened.namespace_id, wrong)
        assert client.put(opened.namespace_id, blocks).outcomes == (Outcome.HIT,) * 3
        status = admin_pb2.StatusResponse.FromString(client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0))
        assert status.reservations <= 3


def test_places_of_an_older_daemon_are_used_once():
    pool = StandingPlaces()
    pool.take(1, A, 1)
    reserved = ReserveResult((Outcome.PENDING,), (ids(1)[0],), (places(1)[0].place,))
    assert pool.settle(A, answered(reserved), HIT, 8) == []
    assert pool.take(1, A, 1) == []


def test_a_client_of_an_older_daemon_reserves_for_each_put(daemon, spec, monkeypatch):
    with Client(str(daemon.socket), ClientOptions(strict=True)) as client:
        opened = client.open_namespace(spec)
        asked, make = [], client.operations.reserve

        def reserve(*arguments, standing=False):
            asked.append(arguments[3])
            return make(*arguments)

        monkeypatch.setattr(client.operations, "reserve", reserve)
        for seed in range(3):
            keys, _ = chain(opened.namespace_id, 2, seed=seed)
            assert client.put(opened.namespace_id, blocks_of(LAYOUT, keys)).outcomes == (Outcome.HIT,) * 2
        assert asked == [2] * 3


def reserves(client, monkeypatch):
    """Counts of places that were asked for, call by call."""
    asked, make = [], client.operations.reserve
    monkeypatch.setattr(
        client.operations,
        "reserve",
        lambda *a, **k: (asked.append(a[3]) if k.get("standing") else None) or make(*a, **k),
    )
    return asked


def test_a_client_reserves_once_for_many_puts(daemon, spec, monkeypatch):
    with Client(str(daemon.socket), ClientOptions(strict=True)) as client:
        opened = client.open_namespace(spec)
        asked = reserves(client, monkeypatch)
        chains = [chain(opened.namespace_id, 3, seed=seed)[0] for seed in range(4)]
        for keys in chains:
            assert client.put(opened.namespace_id, blocks_of(LAYOUT, keys)).outcomes == (Outcome.HIT,) * 3
        assert asked == [3]
        got = [client.get(opened.namespace_id, keys) for keys in chains]
        assert [[bytes(p) for p in one.payloads] for one in got] == [
            [payload(LAYOUT, k) for k in keys] for keys in chains
        ]


def test_another_namespace_gets_the_room(daemon, monkeypatch):
    one, other = (small_spec(salt=f"standing room {n}".encode()) for n in range(2))
    room = 2 * 3 * LAYOUT.raw_stored_bytes
    with Client(str(daemon.socket), ClientOptions(strict=True, buffer_bytes=room)) as client:
        opened = [client.open_namespace(spec).namespace_id for spec in (one, other)]
        asked = reserves(client, monkeypatch)
        for namespace in (*opened, *opened):
            keys, _ = chain(namespace, 7)
            done = client.put(namespace, blocks_of(LAYOUT, keys))
            assert done.outcomes == (Outcome.HIT,) * 7
        assert asked
        keys, _ = chain(opened[0], 7)
        got = client.get(opened[0], keys)
        assert [bytes(p) for p in got.payloads] == [payload(LAYOUT, key) for key in keys]


def test_a_put_after_a_restart_finds_new_places(tmp_path, spec):
    daemon = DaemonProcess(tmp_path)
    daemon.start()
    try:
        with Client(str(daemon.socket), ClientOptions()) as client:
            opened = client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 2)
            assert client.put(opened.namespace_id, blocks_of(LAYOUT, keys)).outcomes == (Outcome.HIT,) * 2
            daemon.kill()
            assert client.put(opened.namespace_id, blocks_of(LAYOUT, keys)).outcomes == (Outcome.MISS,) * 2
            daemon.start()
            assert client.wait_ready(20)
            assert client.put(opened.namespace_id, blocks_of(LAYOUT, keys)).outcomes == (Outcome.HIT,) * 2
            assert client.match(opened.namespace_id, keys).matched == 2
    finally:
        daemon.stop()


def test_a_put_that_raises_leaves_nothing_reserved(daemon, spec, monkeypatch):
    with Client(str(daemon.socket), ClientOptions(strict=True)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)

        def fail(*_):
            raise Unavailable("no memory")

        with monkeypatch.context() as patched:
            patched.setattr(sync, "copy_all", fail)
            with pytest.raises(Unavailable):
                client.put(opened.namespace_id, blocks_of(LAYOUT, keys))
        reply = client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0)
        assert admin_pb2.StatusResponse.FromString(reply).reservations == 0
        assert client.put(opened.namespace_id, blocks_of(LAYOUT, keys)).outcomes == (Outcome.HIT,) * 2


def test_the_asyncio_client_reserves_once_too(daemon, spec, monkeypatch):
    async def run():
        async with AsyncClient(str(daemon.socket), ClientOptions(strict=True)) as client:
            opened = await client.open_namespace(spec)
            asked = reserves(client, monkeypatch)
            for seed in range(3):
                keys, _ = chain(opened.namespace_id, 2, seed=seed)
                done = await client.put(opened.namespace_id, blocks_of(LAYOUT, keys))
                assert done.outcomes == (Outcome.HIT,) * 2
                got = await client.get(opened.namespace_id, keys)
                assert [bytes(p) for p in got.payloads] == [payload(LAYOUT, key) for key in keys]
            assert asked == [2]

    asyncio.run(run())


def test_whole_reserves_all_places_or_none_with_either_client(daemon, spec):
    options, wanted = ClientOptions(strict=True, buffer_bytes=1 << 20), {"count": 4096, "whole": True}

    async def run():
        async with AsyncClient(str(daemon.socket), options) as client:
            namespace = (await client.open_namespace(spec)).namespace_id
            return await client.reserve(namespace, Tier.HOST, **wanted)

    with Client(daemon.socket, options) as client:
        namespace = client.open_namespace(spec).namespace_id
        for none in (asyncio.run(run()), client.reserve(namespace, Tier.HOST, **wanted)):
            assert set(none.outcomes) == {Outcome.BUSY}
            assert not any(none.reservation_ids)
        some = client.reserve(namespace, Tier.HOST, count=4096)
        assert set(some.outcomes) == {Outcome.PENDING, Outcome.BUSY}
