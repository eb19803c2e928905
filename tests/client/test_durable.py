"""A durable put, over every transport: what it answers HIT for is durable, whoever brought it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, Control
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Durability, Outcome, Tier, WritePolicy
from tests.client.harness import blocks_of, chain, small_spec

BACK = NamespacePolicy(write=WritePolicy.BACK)
"""Nothing is written to SSD before HOST needs the room."""
_salts = itertools.count()


@pytest.fixture(params=["socket", "grpc", "remote"])
def target(request, daemon):
    if request.param == "remote":
        return f"grpc://127.0.0.1:{daemon.port}", ClientOptions(strict=True)
    control = Control.GRPC if request.param == "grpc" else Control.SOCKET
    return daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, control=control)


@pytest.fixture
def spec():
    return small_spec(salt=f"durable {next(_salts)}".encode())


def on_ssd(match):
    return [bool(bits & Tier.SSD.bit) for bits in match.residency]


def test_a_durable_put_of_what_is_in_memory_makes_it_durable(target, spec):
    with Client(*target) as client:
        opened = client.open_namespace(spec, policy=BACK)
        namespace, layout = opened.namespace_id, opened.layout
        keys, _ = chain(namespace, 3)
        client.put(namespace, blocks_of(layout, keys))
        assert on_ssd(client.match(namespace, keys)) == [False] * 3
        again = client.put(namespace, blocks_of(layout, keys, durability=Durability.DURABLE))
        assert (again.outcomes, again.existed) == ((Outcome.HIT,) * 3, (True,) * 3)
        assert on_ssd(client.match(namespace, keys)) == [True] * 3


def test_the_asyncio_client_does_so_too(target, spec):
    async def run():
        async with AsyncClient(*target) as client:
            opened = await client.open_namespace(spec, policy=BACK)
            namespace, layout = opened.namespace_id, opened.layout
            keys, _ = chain(namespace, 3)
            await client.put(namespace, blocks_of(layout, keys))
            again = await client.put(namespace, blocks_of(layout, keys, durability=Durability.DURABLE))
            assert (again.outcomes, again.existed) == ((Outcome.HIT,) * 3, (True,) * 3)
            assert on_ssd(await client.match(namespace, keys)) == [True] * 3

    asyncio.run(run())
