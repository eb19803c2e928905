"""The trace: each copy that comes or goes is named in the log, and its going is named before the disk hears of it."""

from __future__ import annotations

import logging

import pytest

from kvstore.core.types import Tier
from kvstore.store.history import trace


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
