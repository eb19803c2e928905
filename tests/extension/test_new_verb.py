"""A new data verb, CountResident: this file, and no edit elsewhere. Both transports, both clients, strict and not."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvstore.client import AsyncClient, Client, ClientOptions
from kvstore.client.options import Control
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.daemon.config import Config
from kvstore.v1 import cache_pb2
from kvstore.wire.messages import target_of
from kvstore.wire.verbs import VERBS, Verb, register
from tests.client.harness import blocks_of, chain, daemon_thread, small_spec


def serve(call, request):
    namespace, keys = target_of(request.namespace_id, request.keys)
    here = sum(call.session.match(namespace, [key]).matched for key in keys)
    return cache_pb2.AbortResponse(aborted=here, unknown=len(keys) - here)


COUNT_RESIDENT = Verb(
    name="kvstore.v1.Cache/CountResident",
    request=cache_pb2.MatchRequest,
    reply=cache_pb2.AbortResponse,
    serve=serve,
    pack=lambda ids, namespace, keys: cache_pb2.MatchRequest(namespace_id=namespace, keys=b"".join(keys)),
    unpack=lambda ids, arguments, reply, generation: reply.aborted,
    fallback=lambda ids, namespace, keys: 0,
    again=True,
)


@pytest.fixture(autouse=True)
def _registered():
    register(COUNT_RESIDENT)
    yield
    del VERBS[COUNT_RESIDENT.name]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("control", [Control.SOCKET, Control.GRPC])
def test_a_new_verb_is_called_like_any_other(tmp_path, control, strict):
    options = ClientOptions(strict=strict, control=control, buffer_bytes=1 << 20)
    config = Config.model_validate({"socket": tmp_path / "s", "host": 8 << 20, "device": 0})
    with contextlib.ExitStack() as stack:
        with daemon_thread(config):
            client = stack.enter_context(Client(config.socket, options))
            opened = client.open_namespace(small_spec())
            namespace = opened.namespace_id
            keys, _ = chain(namespace, 4)
            client.put(namespace, blocks_of(opened.layout, keys[:3]))
            assert client.call(COUNT_RESIDENT, namespace, keys) == 3

            async def run():
                async with AsyncClient(config.socket, options) as other:
                    await other.open_namespace(small_spec())
                    return await other.call(COUNT_RESIDENT, namespace, keys)

            assert asyncio.run(run()) == 3
            with pytest.raises(InvalidArgument, match="twice"):
                client.call(COUNT_RESIDENT, namespace, keys[:1] * 2)
        if strict:
            with pytest.raises(KVStoreError):
                client.call(COUNT_RESIDENT, namespace, keys)
        else:
            assert client.call(COUNT_RESIDENT, namespace, keys) == 0
