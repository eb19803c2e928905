"""What operators see: status, lists, one block, why, events, verify, drain, the disk's ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument, NamespaceMismatch, ResourceExhausted, Unavailable, UnknownBlock
from kvstore.core.keys import chain_keys
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Area, Outcome, Reason, Target, Tier, WritePolicy
from kvstore.store.config import StoreConfig
from kvstore.store.report import EventKind
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import ON_DEVICE, SPEC, STORED

DEVICE, HOST, SSD = (tier.bit for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))
HIT, MISS, PENDING, BUSY = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.BUSY


def test_status_counts_what_is_there(world, disk):
    keys = world.chain(1, 3)
    world.put(keys)
    world.run()
    lease = world.cache.grant_lease("x", 1000)
    world.cache.fetch(world.namespace_id, keys[:2], Target.HOST, lease_id=lease)
    world.cache.reserve(world.namespace_id, Tier.DEVICE, count=2)
    status = world.store.status()
    device, host, ssd = status.tiers
    assert (device.blocks, device.used_bytes, device.reserved_bytes) == (0, 2 * ON_DEVICE, 2 * ON_DEVICE)
    assert (host.blocks, host.used_bytes, host.pinned_bytes) == (3, 3 * STORED, 2 * STORED)
    assert (ssd.blocks, ssd.used_bytes, ssd.capacity_bytes) == (3, disk.used_bytes, disk.capacity_bytes)
    assert (status.sessions, status.leases, status.reservations, status.jobs) == (1, 1, 2, 0)
    assert (status.boot_id, status.draining) == (world.store.boot_id, False)
    assert status.counters["ssd_blocks_written"] == 3


def test_namespaces_are_named_and_bound(world):
    assert world.cache.open_namespace(SPEC, name="one").created is False
    other = replace(SPEC, rope='{"theta":10000}')
    with pytest.raises(NamespaceMismatch) as caught:
        world.cache.open_namespace(other, name="one")
    assert caught.value.field == "rope"
    assert len(world.store.namespaces()) == 1
    opened = world.cache.open_namespace(other, name="two")
    assert opened.created
    assert [near.fields for near in opened.near] == [("rope",)]
    assert [report.name for report in world.store.namespaces()] == ["one", "two"]
    world.cache.open_namespace(other, policy=NamespacePolicy(write=WritePolicy.BACK))
    assert world.store.namespaces()[1].policy.write is WritePolicy.BACK
    world.cache.open_namespace(other)
    assert world.store.namespaces()[1].policy.write is WritePolicy.BACK


def test_namespaces_are_bounded(make_world):
    world = make_world(config=StoreConfig(namespaces_max=1, peer_share=1.0))
    with pytest.raises(ResourceExhausted, match="namespaces_max"):
        world.cache.open_namespace(replace(SPEC, salt=b"x"))
    with pytest.raises(InvalidArgument, match="name"):
        world.cache.open_namespace(SPEC, name="n" * 257)


def test_lists_page_through_blocks_coldest_first(world):
    keys = []
    for number in range(5):
        keys += world.chain(number, 1)
        world.put(keys[-1:])
        world.clock.advance(1)
    pages, token = [], ""
    while True:
        page = world.store.list_blocks(limit=2, page_token=token)
        pages.append([block.key for block in page.blocks])
        token = page.next_page_token
        if not token:
            break
    assert pages == [keys[:2], keys[2:4], keys[4:]]
    assert world.store.list_blocks(tier=Tier.DEVICE).blocks == ()
    assert len(world.store.list_blocks(tier=Tier.HOST, namespace_id=world.namespace_id).blocks) == 5
    for options in ({"limit": 0}, {"limit": 10_001}, {"page_token": "x"}, {"page_token": "1.-2"}):
        with pytest.raises(InvalidArgument):
            world.store.list_blocks(**options)


def test_one_block_by_its_key_or_a_prefix(world):
    keys = world.chain(1, 2)
    world.put(keys)
    world.clock.advance(5)
    lease = world.cache.grant_lease("x", 1000)
    world.cache.hold(lease, world.namespace_id, keys[:1])
    shown = world.store.show_block(keys[0][:4])
    assert (shown.key, shown.parent, shown.children, shown.holds, shown.residency) == (keys[0], bytes(32), 1, 1, HOST)
    assert (shown.state, shown.idle_seconds, shown.hits) == ("ready", 5.0, 1)
    assert world.store.show_block(keys[1]).parent == keys[0]
    with pytest.raises(UnknownBlock):
        world.store.show_block(b"nope")
    with pytest.raises(InvalidArgument, match="key_prefix"):
        world.store.show_block(keys[0][:3])


def test_why_names_the_first_missing_block_and_the_cause(make_world):
    world = make_world(host_blocks=4)
    tokens = [1, *[7] * 31]
    keys = chain_keys(world.namespace_id, tokens, 8)
    assert world.store.why(world.namespace_id, token_ids=tokens).reason is Reason.NEVER_STORED
    world.put(keys)
    assert world.store.why(world.namespace_id, token_ids=tokens).reason is Reason.NONE
    world.put(world.chain(2, 1))
    world.clock.advance(3)
    why = world.store.why(world.namespace_id, token_ids=tokens)
    assert (why.blocks, why.matched, why.key, why.reason, why.seconds_ago) == (4, 3, keys[3], Reason.EVICTED, 3.0)
    assert "evicted for space 3.0 s ago" in why.explanation
    world.cache.remove(world.namespace_id, keys[:1])
    assert world.store.why(world.namespace_id, keys=keys).reason is Reason.REMOVED
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, keys=world.chain(3, 1))
    assert world.store.why(world.namespace_id, keys=world.chain(3, 1)).reason is Reason.UNCOMMITTED
    world.cache.abort(reserved.reservation_ids)
    for options in ({}, {"token_ids": tokens, "keys": keys}):
        with pytest.raises(InvalidArgument):
            world.store.why(world.namespace_id, **options)


def test_why_names_the_namespace_where_the_tokens_match(world):
    tokens = [1, *[7] * 15]
    world.put(chain_keys(world.namespace_id, tokens, 8))
    other = world.cache.open_namespace(replace(SPEC, revision="b", rope='{"theta":1}')).namespace_id
    why = world.store.why(other, token_ids=tokens)
    assert (why.matched, why.near[0].namespace_id, why.near[0].blocks) == (0, world.namespace_id, 2)
    assert why.near[0].fields == ("revision", "rope")
    assert "2 blocks match in a namespace that differs in revision, rope" in why.explanation


def test_why_speaks_of_quarantine_and_of_a_tier_that_is_down(world, disk):
    keys = world.chain(1, 2)
    world.put(keys)
    world.run()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    disk.degraded = True
    world.store.tick()
    assert world.store.why(world.namespace_id, keys=keys).reason is Reason.TIER_UNAVAILABLE
    disk.degraded = False
    world.store.tick()
    disk.corrupt(keys[0])
    world.fetch(keys)
    assert world.store.why(world.namespace_id, keys=keys).reason is Reason.QUARANTINED


def test_tombstones_are_bounded(make_world):
    world = make_world(host_blocks=2, config=StoreConfig(tombstones_max=2))
    for number in range(6):
        world.put(world.chain(number, 1))
    reasons = [world.store.why(world.namespace_id, keys=world.chain(n, 1)).reason for n in range(4)]
    assert reasons == [Reason.NEVER_STORED] * 2 + [Reason.EVICTED] * 2


def test_events_tell_the_new_tier_before_the_old(make_world, disk):
    world = make_world(host_blocks=2, disk=disk, write=WritePolicy.BACK)
    keys = world.chain(1, 2)
    world.put(keys)
    world.put(world.chain(2, 1))
    told = [(e.kind.name, e.tier.name, e.keys) for e in world.store.events_after(0)]
    assert told == [
        ("STORED", "HOST", tuple(keys)),
        ("STORED", "SSD", tuple(keys)),
        ("REMOVED", "HOST", (keys[1],)),
        ("STORED", "HOST", tuple(world.chain(2, 1))),
    ]
    assert [e.sequence for e in world.store.events_after(0)] == [1, 2, 3, 4]
    assert [e.sequence for e in world.store.events_after(2, limit=1)] == [3]
    assert world.store.events_after(4) == []


def test_a_reader_that_is_too_slow_gets_a_gap(make_world):
    world = make_world(config=StoreConfig(events_max=3))
    for number in range(5):
        world.put(world.chain(number, 1))
    found = world.store.events_after(0)
    assert [(e.kind, e.sequence) for e in found] == [
        (EventKind.GAP, 2), (EventKind.STORED, 3), (EventKind.STORED, 4), (EventKind.STORED, 5),
    ]  # fmt: skip
    assert world.store.events_after(2)[0].kind is EventKind.STORED
    # A sequence from before a restart is above all that this process has told.
    assert world.store.events_after(99)[0].kind is EventKind.GAP
    other = world.cache.open_namespace(replace(SPEC, salt=b"x")).namespace_id
    assert world.store.events_after(2, namespace_id=other) == []


def test_listeners_are_called_after_events_until_they_unsubscribe(world):
    calls = []
    unsubscribe = world.store.on_events(lambda: calls.append(world.store.last_event))
    world.put(world.chain(1, 1))
    assert calls == [1]
    world.cache.match(world.namespace_id, world.chain(1, 1))
    assert calls == [1]
    unsubscribe()
    unsubscribe()
    world.put(world.chain(2, 1))
    assert calls == [1]


def test_evict_by_keys_says_what_became_of_each(make_world):
    world = make_world()
    keys = world.chain(1, 3)
    world.put(keys)
    lease = world.cache.grant_lease("x", 1000)
    world.cache.fetch(world.namespace_id, keys[:1], Target.HOST, lease_id=lease)
    report = world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=[*keys, *world.chain(9, 1)])
    assert report.outcomes == (BUSY, HIT, HIT, MISS)
    assert (report.blocks, report.bytes) == (2, 2 * STORED)
    assert world.store.evict(Tier.HOST, nbytes=1).blocks == 0
    for options in (
        {"tier": Tier.SSD, "nbytes": 1},
        {"tier": Tier.HOST},
        {"tier": Tier.HOST, "nbytes": -1},
        {"tier": Tier.HOST, "keys": keys},
        {"tier": Tier.HOST, "keys": keys, "namespace_id": world.namespace_id, "nbytes": 1},
    ):
        with pytest.raises(InvalidArgument):
            world.store.evict(**options)


def test_evict_by_bytes_frees_what_may_go_when_asked_for_more(world):
    pinned, free = world.chain(1, 2), world.chain(2, 5)
    world.put(pinned)
    world.put(free)
    lease = world.cache.grant_lease("x", 1000)
    world.cache.fetch(world.namespace_id, pinned, Target.HOST, lease_id=lease)
    report = world.store.evict(Tier.HOST, nbytes=1 << 40)
    assert (report.blocks, report.bytes) == (5, 5 * STORED)
    assert all(bits & Tier.HOST.bit for bits in world.residency(pinned))
    assert not any(bits & Tier.HOST.bit for bits in world.residency(free))


def test_a_parent_is_not_evicted_before_its_children(world):
    keys = world.chain(1, 2)
    world.put(keys)
    assert world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys[:1]).outcomes == (BUSY,)
    assert len(world.residency(keys)) == 2


def test_verify_finds_bad_bytes_in_host_and_on_ssd(world, disk):
    keys = world.chain(1, 3)
    world.put(keys)
    world.run()
    assert world.store.verify().bad == 0
    assert world.store.verify().bytes == 2 * 3 * STORED
    offset = int(world.store.show_block(keys[0]).places["HOST"])
    world.store.host.view(offset + 4096, 1)[0] ^= 1
    disk.corrupt(keys[2])
    report = world.store.verify(namespace_id=world.namespace_id)
    assert (report.blocks, report.bad, set(report.bad_keys)) == (3, 2, {keys[0], keys[2]})
    assert world.residency(keys) == (SSD, HOST | SSD, HOST)
    assert world.fetch(keys).outcomes == (HIT,) * 3
    assert world.store.verify(namespace_id=world.namespace_id, keys=keys[:1]).bad == 0
    assert [entry.key for entry in world.store.quarantine()] == [keys[2]]
    assert [entry.key for entry in world.store.quarantine(empty=True)] == [keys[2]]
    assert world.store.quarantine() == ()
    with pytest.raises(InvalidArgument):
        world.store.verify(bytes_per_second=-1)
    with pytest.raises(InvalidArgument):
        world.store.verify(keys=keys)


def test_a_bad_copy_that_is_pinned_is_not_reused_while_it_is_read(make_world):
    world = make_world(host_blocks=2)
    (key,) = world.chain(1, 1)
    lease = world.cache.grant_lease("reader", 60_000)
    world.put([key], lease_id=lease)
    offset = int(world.store.show_block(key).places["HOST"])
    world.store.host.view(offset + 4096, 1)[0] ^= 1
    assert world.store.verify().bad == 1
    assert world.residency([key]) == ()
    assert world.store.status().tiers[1].used_bytes == STORED
    assert world.put(world.chain(2, 2)).outcomes == (HIT, BUSY)
    world.cache.release(lease)
    assert world.store.status().tiers[1].used_bytes == STORED
    assert world.put(world.chain(3, 1)).outcomes == (HIT,)


def test_draining_refuses_new_blocks_and_flushes(make_world, disk):
    world = make_world(disk=disk, write=WritePolicy.BACK)
    keys = world.chain(1, 2)
    world.put(keys)
    reserved = world.cache.reserve(world.namespace_id, Tier.DEVICE, count=1)
    report = world.store.drain()
    assert (report.draining, report.flushed_blocks, report.unflushed_blocks) == (True, 2, 0)
    assert world.store.status().draining
    refused = world.cache.reserve(world.namespace_id, Tier.HOST, keys=[*keys, *world.chain(2, 1)])
    assert refused.outcomes == (HIT, HIT, BUSY)
    assert refused.busy.reason is Reason.DRAINING
    entry = CommitEntry(reserved.reservation_ids[0], world.chain(3, 1)[0], bytes(32))
    done = world.cache.commit(world.namespace_id, [entry])
    assert (done.outcomes, done.reasons) == ((MISS,), (Reason.DRAINING,))
    assert world.fetch(keys).outcomes == (HIT, HIT)
    assert not world.store.drain(resume=True).draining
    assert world.put(world.chain(2, 1)).outcomes == (HIT,)


def test_the_disk_verbs_need_a_disk(make_world):
    world = make_world()
    for call in (world.store.disk_usage, world.store.compact, world.store.quarantine):
        with pytest.raises(Unavailable):
            call()
    assert world.cache.flush() == 0
    with_disk = make_world(disk=MemoryDisk())
    assert with_disk.store.disk_usage().directory == "memory"
    assert with_disk.store.compact().bytes_freed == 0
    with pytest.raises(InvalidArgument):
        with_disk.store.compact(1.5)


def test_int8_blocks_are_encoded_on_their_way_down_and_raw_where_they_have_to(make_world):
    world = make_world(disk=MemoryDisk())
    spec = replace(SPEC, codec="int8", model="coded")
    opened = world.cache.open_namespace(spec)
    layout = opened.layout
    keys = chain_keys(opened.namespace_id, [1, *[7] * 15], 8)
    reserved = world.cache.reserve(opened.namespace_id, Tier.HOST, keys=keys)
    buffer = world.cache.memory(Area.BUFFER)
    wanted = []
    for number, place in enumerate(reserved.places):
        values = np.random.default_rng(number).standard_normal((3, layout.raw_slice_bytes // 2)).astype(np.float16)
        if number == 1:
            values[2, 5] = np.nan
        wanted.append(values)
        for layer in range(3):
            at = place.offset + layer * place.stride
            buffer[at : at + layout.raw_slice_bytes] = values[layer].tobytes()
    parents = [bytes(32), keys[0]]
    entries = [CommitEntry(*row) for row in zip(reserved.reservation_ids, keys, parents, strict=True)]
    assert world.cache.commit(opened.namespace_id, entries).outcomes == (HIT, HIT)
    assert [world.store.show_block(key).codec.word for key in keys] == ["int8", "raw"]
    world.run()
    world.store.evict(Tier.HOST, namespace_id=opened.namespace_id, keys=keys)
    lease = world.cache.grant_lease("x", 1000)
    started = world.cache.fetch(opened.namespace_id, keys, Target.DEVICE, lease_id=lease)
    world.run()
    done = world.cache.wait_job(started.job_id, 0)
    device = world.cache.memory(Area.DEVICE)
    for values, place in zip(wanted, done.places, strict=True):
        for layer in range(3):
            at = place.offset + layer * place.stride
            got = np.frombuffer(device[at : at + layout.raw_slice_bytes], np.float16)
            np.testing.assert_allclose(got, values[layer], atol=0.05)
    # Back down from DEVICE under the same codecs: the same bytes as before.
    world.store.evict(Tier.HOST, namespace_id=opened.namespace_id, keys=keys)
    started = world.cache.fetch(opened.namespace_id, keys, Target.HOST, lease_id=lease)
    world.run()
    assert [place.codec.word for place in world.cache.wait_job(started.job_id, 0).places] == ["int8", "raw"]
