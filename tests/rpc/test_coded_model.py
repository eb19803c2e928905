"""Random puts and gets of blocks under every dtype and codec, by clients that code and clients that do not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvstore.client import PutBlocks
from kvstore.core.keys import parents_of
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import Codec, Coding, Outcome
from kvstore.wire import chunks
from tests.rpc.coded import LZ4, chain, kv_of, noise_of, read_chunks, spec_of


@dataclass
class World:
    """Blocks as they were put, raw, by key."""

    opened: object
    spec: NamespaceSpec
    blocks: dict[bytes, bytes] = field(default_factory=dict)


SPECS = [
    ("bfloat16", {}),
    ("bfloat16", {"layers": 5, "kv_heads": 8, "head_dim": 256}),
    ("float16", {}),
    ("float32", {}),
    ("float16", {"codec": "int8"}),
    ("bfloat16", {"codec": "int8", "raw_layers": (1,)}),
    ("bytes", {"opaque_slice_bytes": 5001}),
]


@pytest.mark.parametrize("seed", range(4))
def test_random_puts_and_gets_with_mixed_codings(connect, seed):
    draw = random.Random(seed)
    clients, worlds = [connect(True), connect(False)], []
    for dtype, changes in draw.sample(SPECS, 4):
        spec = spec_of(dtype, **changes)
        policy = draw.choice([LZ4, LZ4, None])
        opened, _ = [client.open_namespace(spec, policy=policy) for client in clients]
        worlds.append(World(opened, spec))
    for step in range(12):
        world, client = draw.choice(worlds), draw.choice(clients)
        keys = chain(world.opened.namespace_id, draw.randint(1, 3), seed=draw.randint(0, 3))
        payloads = [draw.choice([kv_of, noise_of])(world.spec, 100 * seed + step) for _ in keys]
        fresh = [(key, data) for key, data in zip(keys, payloads, strict=True) if key not in world.blocks]
        client.put(world.opened.namespace_id, PutBlocks(keys, parents_of(keys), payloads))
        world.blocks |= dict(fresh)
        check(world, clients, keys, draw)


def check(world, clients, keys, draw):
    """What either client gets is what was put; where the daemon has encoded, both get the same."""
    got = [client.get(world.opened.namespace_id, keys) for client in clients]
    assert got[0].outcomes == got[1].outcomes == (Outcome.HIT,) * len(keys)
    assert got[0].codecs == got[1].codecs
    for key, codec, *parts in zip(keys, got[0].codecs, got[0].payloads, got[1].payloads, strict=True):
        assert bytes(parts[0]) == bytes(parts[1])
        if codec is Codec.RAW:
            assert bytes(parts[0]) == world.blocks[key]
    begin = draw.randrange(world.spec.layers)
    fields = {"layer_begin": begin, "layer_end": draw.randint(begin + 1, world.spec.layers)}
    answers = [
        joined(read_chunks(clients[0], world.opened.namespace_id, keys, accept=accept, **fields))
        for accept in ([], [int(Coding.LZ4)])
    ]
    assert answers[0] == answers[1]


def joined(sent):
    """Plain bytes by key."""
    found = {}
    for chunk in sent:
        assert chunk.offset == len(found.get(chunk.key_index, b""))
        found[chunk.key_index] = found.get(chunk.key_index, b"") + bytes(chunks.plain_data(chunk, 1 << 30))
    return found
