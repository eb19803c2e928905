"""Blocks under INT8 in every tier, DEVICE too, with layers and first tokens that stay raw: bytes, places, counts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvstore.cache import CommitEntry
from kvstore.core.clock import ManualClock
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import Area, Codec, Outcome, Reason, Target, Tier
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.embedded import build_store
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.tiers.coding import encode_block

SPEC = NamespaceSpec(model="mixed", dtype="float16", layers=8, kv_heads=4, head_dim=16, block_tokens=16, codec="int8")
"""Raw slices of 4,096 bytes, int8 units of 2,560: a block on DEVICE has 32,768 bytes raw and 20,480 under int8."""

ON_DEVICE = NamespacePolicy(device_codec="int8")


def tier_of(store, tier):
    return next(report for report in store.status().tiers if report.tier is tier)


class Mixed:
    """A store with one session and one namespace; the values of a block follow from its key."""

    def __init__(self, spec=SPEC, policy=ON_DEVICE, device_bytes=8 * 32768, host_bytes=1 << 20):
        full = Watermarks(high=1.0, low=1.0)
        config = StoreConfig(device=full, host=full, ssd=full, loader_threads=0, writer_threads=0)
        self.store = build_store(
            config, host_bytes=host_bytes, device_bytes=device_bytes, disk=MemoryDisk(), clock=ManualClock()
        )
        self.cache = self.store.open_session("embedded", buffer_bytes=1 << 20)
        self.spec, self.layout = spec, BlockLayout.of(spec)
        self.id = self.cache.open_namespace(spec, policy=policy).namespace_id
        self.lease = self.cache.grant_lease("test", 600_000)

    def chain(self, seed, blocks):
        tokens = self.spec.block_tokens
        return chain_keys(self.id, [seed] + [7] * (blocks * tokens - 1), tokens)

    def good_chain(self, blocks):
        """A chain that INT8 can hold."""
        return next(c for c in (self.chain(seed, blocks) for seed in range(100)) if all(key[0] >= 40 for key in c))

    def raw(self, key):
        """The raw slices at their stride; a key whose first byte is below 40 has an infinite value in layer 2."""
        rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
        data = bytearray(self.layout.units_bytes(Codec.RAW))
        for layer in range(self.spec.layers):
            values = rng.standard_normal(self.layout.raw_slice_bytes // 2).astype(np.float16)
            if layer == 2 and key[0] < 40:
                values[5] = np.inf
            begin = self.layout.layer_offset(Codec.RAW, layer)
            data[begin : begin + self.layout.raw_slice_bytes] = values.tobytes()
        return data

    def coded(self, key):
        raw, out = memoryview(self.raw(key)), memoryview(bytearray(self.layout.units_bytes(Codec.INT8)))
        return out if encode_block(raw, out, self.layout, self.spec.geometry) else None

    def put(self, keys, tier=Tier.DEVICE):
        reserved = self.cache.reserve(self.id, tier, keys=keys)
        entries = []
        for key, parent, number, place in zip(
            keys, parents_of(keys), reserved.reservation_ids, reserved.places, strict=True
        ):
            if place is not None:
                assert place.codec is Codec.RAW
                memory = self.cache.memory(place.area)
                memory[place.offset : place.offset + self.layout.units_bytes(Codec.RAW)] = self.raw(key)
                entries.append(CommitEntry(number, key, parent))
        return self.cache.commit(self.id, entries, lease_id=self.lease) if entries else None

    def fetch(self, keys, target, layers=None):
        found = self.cache.fetch(self.id, keys, target, lease_id=self.lease, layers=layers)
        if found.job_id:
            self.store.run_pending()
            found = self.cache.wait_job(found.job_id, 10_000)
        for key, outcome, place in zip(keys, found.outcomes, found.places, strict=True):
            if outcome is Outcome.HIT:
                self.check(key, place, layers or (0, self.spec.layers))
        return found

    def check(self, key, place, layers):
        """Bytes at a place are those of the block under the place's codec."""
        begin, end = layers
        layout, codec = self.layout, place.codec
        memory = self.cache.memory(place.area)
        coded = self.coded(key)
        assert place.stride == layout.of_codec(codec)[1]
        for layer in range(begin, end):
            at = place.offset + layout.layer_offset(codec, layer, begin)
            raw_at, nbytes = layout.layer_offset(Codec.RAW, layer), layout.raw_slice_bytes
            wanted = self.raw(key)[raw_at : raw_at + nbytes]
            if layout.layer_codec(codec, layer) is Codec.INT8:
                nbytes, coded_at = self.spec.geometry.int8_bytes, layout.layer_offset(codec, layer)
                wanted = coded[coded_at : coded_at + nbytes]
            assert memory[at : at + nbytes] == wanted


@pytest.fixture
def make():
    made = []

    def build(**options):
        made.append(Mixed(**options))
        return made[-1]

    yield build
    for mixed in made:
        mixed.store.close()


@pytest.mark.parametrize("raw_layers", [(), (0,), (3, 7)])
def test_a_commit_on_device_answers_the_smaller_block(make, raw_layers):
    mixed = make(spec=replace(SPEC, raw_layers=raw_layers))
    keys = [key for seed in range(6) for key in mixed.chain(seed, 1) if key[0] >= 40][:3]
    size = -(-mixed.layout.units_bytes(Codec.INT8) // 4096) * 4096
    for key in keys:
        (place,) = mixed.put([key]).places
        assert (place.area, place.codec, place.stride) == (Area.DEVICE, Codec.INT8, mixed.layout.slice_stride)
        mixed.check(key, place, (0, 8))
    device = tier_of(mixed.store, Tier.DEVICE)
    assert (device.used_bytes, device.raw_bytes, device.reserved_bytes) == (3 * size, 3 * 32768, 0)
    assert device.saved_bytes == 3 * (32768 - size)
    assert mixed.store.status().counters["device_blocks_encoded"] == 3
    for target in (Target.IN_PLACE, Target.BUFFER, Target.HOST):
        for layers in (None, (2, 5), (3, 4), (7, 8)):
            assert mixed.fetch(keys, target, layers).outcomes == (Outcome.HIT,) * 3
    mixed.cache.release(mixed.lease, mixed.id, keys)
    mixed.store.evict(Tier.DEVICE, namespace_id=mixed.id, keys=keys)
    found = mixed.fetch(keys, Target.DEVICE)
    assert [place.codec for place in found.places] == [Codec.INT8] * 3
    assert violations(mixed.store) == []


def test_what_int8_can_not_hold_stays_raw_on_device_and_is_counted(make):
    mixed = make()
    bad = next(key for seed in range(100) for key in mixed.chain(seed, 1) if key[0] < 40)
    (place,) = mixed.put([bad]).places
    assert place.codec is Codec.RAW
    assert mixed.store.status().counters["device_blocks_kept_raw"] == 1
    assert mixed.fetch([bad], Target.HOST).places[0].codec is Codec.RAW
    assert violations(mixed.store) == []


def test_a_full_device_is_no_obstacle(make):
    mixed = make(device_bytes=4 * 32768)
    keys = mixed.chain(1, 4)
    places = mixed.put(keys).places
    good = [key[0] >= 40 for key in keys]
    assert [place.codec is Codec.INT8 for place in places] == good
    # What the four gave back has room for another.
    more = mixed.cache.reserve(mixed.id, Tier.DEVICE, count=1)
    assert more.outcomes == (Outcome.PENDING,)
    assert violations(mixed.store) == []


def test_first_tokens_stay_raw_on_device_and_below(make):
    mixed = make(policy=replace(ON_DEVICE, raw_first_tokens=16))
    keys = mixed.good_chain(2)
    assert [place.codec for place in mixed.put(keys).places] == [Codec.RAW, Codec.INT8]
    assert [place.codec for place in mixed.fetch(keys, Target.HOST).places] == [Codec.RAW, Codec.INT8]


def test_int8_on_device_needs_an_int8_namespace(make):
    mixed = make()
    with pytest.raises(InvalidArgument, match="device_codec"):
        mixed.cache.open_namespace(replace(SPEC, codec="raw"), policy=ON_DEVICE)


def test_a_policy_that_changes_leaves_what_is_there(make):
    mixed = make()
    keys = mixed.good_chain(3)
    mixed.put(keys[:2])
    mixed.cache.open_namespace(SPEC, policy=NamespacePolicy(raw_first_tokens=999))
    assert mixed.fetch(keys[:2], Target.IN_PLACE).places[0].codec is Codec.INT8
    assert mixed.fetch(keys[:2], Target.HOST).places[1].codec is Codec.INT8
    assert violations(mixed.store) == []


def test_a_block_that_is_raw_below_is_not_int8_on_device(make):
    mixed = make(policy=NamespacePolicy(raw_first_tokens=999))
    (key,) = mixed.good_chain(1)
    mixed.put([key], Tier.HOST)
    mixed.cache.open_namespace(SPEC, policy=ON_DEVICE)
    reserved = mixed.cache.reserve(mixed.id, Tier.DEVICE, count=1)
    begin = reserved.places[0].offset
    mixed.cache.memory(reserved.places[0].area)[begin : begin + mixed.layout.units_bytes(Codec.RAW)] = mixed.raw(key)
    entry = CommitEntry(reserved.reservation_ids[0], key, bytes(32))
    (place,) = mixed.cache.commit(mixed.id, [entry], lease_id=mixed.lease).places
    assert (place.area, place.codec) == (Area.HOST, Codec.RAW)
    mixed.check(key, place, (0, 8))
    assert tier_of(mixed.store, Tier.DEVICE).used_bytes == 0
    assert violations(mixed.store) == []


def test_pinned_bytes_add_up_when_a_removed_block_comes_back_under_another_codec(make):
    mixed = make()
    (key,) = mixed.good_chain(1)
    mixed.put([key])
    with mixed.store._state.locked() as book:
        book.drop_everywhere(book.index.slots(0)[key], Reason.QUARANTINED)
    mixed.cache.open_namespace(SPEC, policy=NamespacePolicy())
    mixed.put([key])
    assert tier_of(mixed.store, Tier.DEVICE).pinned_bytes == 32768
    mixed.cache.release(mixed.lease, mixed.id, [key])
    device = tier_of(mixed.store, Tier.DEVICE)
    assert (device.pinned_bytes, device.used_bytes) == (0, 32768)
    assert violations(mixed.store) == []


@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_the_bytes_and_the_books(make, seed):
    chance = random.Random(seed)
    raw_layers = tuple(sorted(chance.sample(range(8), chance.choice([0, 0, 1, 2]))))
    policy = replace(ON_DEVICE, raw_first_tokens=chance.choice([0, 16]))
    mixed = make(spec=replace(SPEC, raw_layers=raw_layers), policy=policy, device_bytes=5 * 32768, host_bytes=8 * 36864)
    chains = [mixed.chain(number, 3) for number in range(5)]
    for _ in range(120):
        keys = chance.choice(chains)[: chance.randint(1, 3)]
        match chance.randrange(7):
            case 0 | 1:
                mixed.put(keys, chance.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST]))
            case 2 | 3:
                layers = chance.choice([None, (0, 1), (1, 6), (7, 8)])
                mixed.fetch(keys, chance.choice(list(Target)), layers)
            case 4:
                mixed.cache.release(mixed.lease, mixed.id, keys)
            case 5:
                mixed.store.evict(chance.choice(list(Tier)), namespace_id=mixed.id, keys=keys)
            case _:
                mixed.cache.remove(mixed.id, keys)
        if chance.random() < 0.3:
            mixed.store.run_pending()
        assert violations(mixed.store) == []
    mixed.cache.release(mixed.lease, mixed.id, [key for chain in chains for key in chain])
    assert [tier.pinned_bytes for tier in mixed.store.status().tiers] == [0, 0, 0]


def test_host_holds_1_85_times_the_tokens_of_smollm2():
    held, saved = {}, {}
    for codec in ("raw", "int8"):
        spec = replace(SPEC, layers=30, kv_heads=3, head_dim=64, block_tokens=64, codec=codec)
        mixed = Mixed(spec, NamespacePolicy(), device_bytes=0, host_bytes=64 << 20)
        data = mixed.raw(b"\xff" * 32)
        mixed.raw = lambda key, data=data: data
        for seed in range(110):
            mixed.put(mixed.chain(seed, 1), Tier.HOST)
            mixed.cache.release(mixed.lease, mixed.id, mixed.chain(seed, 1))
        host = tier_of(mixed.store, Tier.HOST)
        assert host.used_bytes == host.blocks * mixed.layout.of_codec(Codec[codec.upper()])[2]
        held[codec], saved[codec] = host.blocks, host.saved_bytes
        assert host.saved_bytes == mixed.store.namespaces()[0].saved_bytes == host.raw_bytes - host.used_bytes
        mixed.store.close()
    assert held["int8"] >= 1.85 * held["raw"]
    assert saved == {"raw": 0, "int8": held["int8"] * (30 * (49152 - 26112))}
