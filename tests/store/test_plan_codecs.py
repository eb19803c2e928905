"""Reading plans over blocks of several codecs: what a plan shows is what a fetch into the buffer shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.cache import CommitEntry
from kvstore.client.plan import Plan
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec, Durability, Outcome, Target, Tier
from kvstore.testing.world import World
from tests.store.planning import needs_native, ssd

pytestmark = needs_native

SPEC = NamespaceSpec(
    model="codecs", dtype="float16", layers=4, kv_heads=2, head_dim=16, block_tokens=16, codec="int8"
)  # fmt: skip
BLOCKS = 30


def put(world, opened, keys, draw):
    """Blocks of numbers, one of which has a value that int8 can not hold and stays raw."""
    layout, cache = opened.layout, world.cache
    reserved = cache.reserve(opened.namespace_id, Tier.HOST, keys=keys)
    memory = cache.memory(reserved.places[0].area)
    for number, place in enumerate(reserved.places):
        for layer in range(layout.layers):
            values = draw.standard_normal(layout.raw_slice_bytes // 2).astype(np.float16)
            if number == 17 and layer == 2:
                values[5] = np.inf
            at = place.offset + layer * place.stride
            memory[at : at + layout.raw_slice_bytes] = values.tobytes()
    entries = map(CommitEntry, reserved.reservation_ids, keys, parents_of(keys))
    done = cache.commit(opened.namespace_id, list(entries), durability=Durability.DURABLE)
    assert set(done.outcomes) == {Outcome.HIT}
    world.run()


@pytest.mark.parametrize("raw_layers", [(), (1,), (0, 3)])
@pytest.mark.parametrize("lossless", ["", "lz4"])
def test_pieces_hold_what_a_fetch_holds(tmp_path, raw_layers, lossless):
    world = World(host_blocks=512, device_blocks=0, disk=ssd(tmp_path / "ssd"), buffer_bytes=4 << 20)
    spec = replace(SPEC, raw_layers=raw_layers)
    policy = NamespacePolicy(raw_first_tokens=3 * spec.block_tokens, lossless=lossless)
    opened = world.cache.open_namespace(spec, policy=policy)
    keys = chain_keys(opened.namespace_id, list(range(BLOCKS * spec.block_tokens)), spec.block_tokens)
    put(world, opened, keys, np.random.default_rng(1))
    layout = opened.layout
    kinds = set()
    with Plan.open(world.cache, opened.namespace_id, keys, piece_bytes=8192, pieces=3) as plan:
        assert plan.keys_mask.all()
        got = {
            (piece.layer, piece.first + row): (piece.codec, piece.data[row].tobytes())
            for piece in plan.pieces()
            for row in range(piece.count)
        }
    assert len(got) == BLOCKS * layout.layers
    for layer in range(layout.layers):
        lease = world.cache.grant_lease("compare", 60_000)
        asked = world.cache.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease, layers=(layer, layer + 1))
        world.run()
        found = world.cache.wait_job(asked.job_id, 10_000)
        for number, place in enumerate(found.places):
            codec, data = got[layer, number]
            assert codec is layout.layer_codec(place.codec, layer)
            assert len(data) == (layout.raw_slice_bytes if codec is Codec.RAW else layout.slice_bytes)
            assert world.cache.memory(place.area)[place.offset : place.offset + len(data)] == data
            kinds.add((place.codec, codec))
        world.cache.release(lease)
    # Raw blocks at the beginning and in the middle, coded ones, and raw layers of those where there are any.
    assert kinds >= {(Codec.RAW, Codec.RAW), (Codec.INT8, Codec.INT8)}
    assert ((Codec.INT8, Codec.RAW) in kinds) == bool(raw_layers)
    world.close()
