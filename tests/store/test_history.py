"""The trace: each copy that comes or goes is named in the log, and its going is named before the disk hears of it."""

from __future__ import annotations

import logging

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.keys import block_key
from kvstore.core.types import Outcome, Reason, Target, Tier
from kvstore.store.config import StoreConfig
from kvstore.store.report import BlockEvent, EventKind
from kvstore.store.tables.history import EventLog, trace
from kvstore.testing.world import SPEC


@pytest.fixture
def told(caplog):
    """Messages of the trace so far; worlds made behind it are traced."""
    caplog.set_level(logging.DEBUG, logger=trace.name)
    return lambda: [record.message for record in caplog.records if record.name == trace.name]


def test_a_block_is_named_when_it_comes_to_a_tier_and_when_it_is_evicted_or_removed(told, make_world, disk):
    world = make_world(disk=disk)
    first, second = world.chain(1, 1) + world.chain(2, 1)
    world.put([first])
    world.put([second])
    world.run()
    world.store.evict(Tier.SSD, namespace_id=world.namespace_id, keys=[first])
    world.cache.remove(world.namespace_id, [second])
    assert [line for line in told() if first.hex() in line] == [
        f"stored HOST {first.hex()}", f"stored SSD {first.hex()}", f"dropped SSD {first.hex()} EVICTED",
    ]  # fmt: skip
    assert [line for line in told() if second.hex() in line][2:] == [
        f"dropped HOST {second.hex()} REMOVED", f"dropped SSD {second.hex()} REMOVED", f"gone {second.hex()} REMOVED",
    ]  # fmt: skip


def test_a_block_is_gone_with_its_last_copy(told, make_world, disk):
    world = make_world(disk=disk)
    (key,) = world.chain(1, 1)
    world.put([key])
    world.run()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=[key])
    assert told()[-1] == f"dropped HOST {key.hex()} EVICTED"
    world.store.evict(Tier.SSD, namespace_id=world.namespace_id, keys=[key])
    assert told()[-2:] == [f"dropped SSD {key.hex()} EVICTED", f"gone {key.hex()} EVICTED"]


def test_a_drop_is_named_before_the_disk_hears_of_it(told, make_world, disk, monkeypatch):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    world.run()
    seen = []
    monkeypatch.setattr(disk, "drop", lambda handles, _keys: seen.append((len(handles), told())))
    world.cache.remove(world.namespace_id, keys)
    ((count, lines),) = seen
    assert count == 2
    assert {f"dropped SSD {key.hex()} REMOVED" for key in keys} <= set(lines)


def test_nothing_is_named_at_other_levels(caplog, make_world):
    caplog.set_level(logging.INFO, logger=trace.name)
    world = make_world()
    world.put(world.chain(1, 1))
    assert not [record for record in caplog.records if record.name == trace.name]


def test_a_reader_of_one_namespace_looks_at_each_event_once(make_world):
    world = make_world(host_blocks=64)
    for number in range(40):
        world.put(world.chain(number, 1))
    store = world.store
    found, sequence = store.read_events(0, (bytes(32),), 256)
    assert (found, sequence) == ([], store.last_event)
    assert store.read_events(sequence, (bytes(32),), 256) == ([], sequence)
    world.put(world.chain(41, 1))
    found, sequence = store.read_events(sequence, (world.namespace_id,), 256)
    assert [event.sequence for event in found] == [sequence] == [store.last_event]


def test_long_logs_are_read_in_bounded_steps():
    log = EventLog(1 << 20)
    for number in range(5000):
        log.add(BlockEvent(number, 0.0, EventKind.STORED, keys=(bytes(32),)))
    steps, sequence = 0, 0
    while sequence < log.last:
        found, sequence = log.after(sequence, (b"other",), 16, 1024)
        assert found == []
        steps += 1
    assert steps == 5


@pytest.mark.parametrize("told", [0, 3, 500])
def test_numbers_of_an_earlier_start_are_answered_with_a_gap(make_world, told):
    first = make_world(config=StoreConfig(events_epoch=1_000_000, events_max=100))
    for number in range(30):
        first.put(first.chain(number, 1))
    second = make_world(config=StoreConfig(events_epoch=2_000_000, events_max=100))
    for number in range(told):
        second.put(second.chain(number, 1))
    found = second.store.events_after(first.store.last_event)
    assert found[0].kind is EventKind.GAP
    assert all(event.sequence > 2_000_000 for event in found[1:])
    assert len(found) > 1 or not told
    assert second.store.events_after(second.store.last_event) == []


def test_the_ring_forgets_the_oldest(make_world):
    log = EventLog(10)
    for number in range(1000):
        log.add(BlockEvent(number, 0.0, EventKind.STORED, keys=(bytes(32),)))
        kept, sequence = log.after(0, None, 1 << 30)
        numbers = [event.sequence for event in kept if event.kind is not EventKind.GAP]
        assert numbers == list(range(max(1, number - 8), number + 2))
        assert sequence == log.last
    assert len(log._ring) <= 21


def test_token_ids_of_blocks_that_were_refused_are_not_kept(world):
    missing = world.chain(9, 1)[0]
    reserved = world.cache.reserve(world.namespace_id, Tier.HOST, count=1)
    tokens = [0] * SPEC.block_tokens
    key = block_key(world.namespace_id, missing, tokens)
    entry = CommitEntry(reserved.reservation_ids[0], key, missing)
    refused = world.cache.commit(world.namespace_id, [entry], token_ids=tokens)
    assert refused.reasons == (Reason.PARENT_MISSING,)
    assert world.store._state._book.news.token_ids == {}


def test_what_a_load_could_not_bring_counts_as_missed(make_world, disk):
    world = make_world(disk=disk)
    keys = world.chain(1, 2)
    world.put(keys)
    world.run()
    world.store.evict(Tier.HOST, namespace_id=world.namespace_id, keys=keys)
    disk.unreadable.add(keys[1])
    lease = world.cache.grant_lease("x", 1000)
    job = world.cache.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease).job_id
    world.run()
    found = world.cache.wait_job(job, 0)
    assert found.outcomes == (Outcome.HIT, Outcome.MISS)
    assert world.store.status().counters[f"fetch_missed_{found.reasons[1].name.lower()}"] == 1
