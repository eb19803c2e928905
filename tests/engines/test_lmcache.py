"""LMCache's own adapter over the plugin: chunks are stored, found and loaded, and a daemon that dies is a miss."""

from __future__ import annotations

import os
import select

import pytest

pytest.importorskip("lmcache")
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import (
    NativePluginL2AdapterConfig,
    _create_native_plugin_l2_adapter,
)
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

from kvstore.tools.daemon_process import DaemonProcess

CHUNK = 192 << 10
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
ALLOCATOR = AdHocMemoryAllocator(device="cpu")


def adapter_for(daemon: DaemonProcess, **more):
    params = {"socket": str(daemon.socket), "chunk_bytes": CHUNK, **more}
    told = {"module_path": "kvstore.adapters.lmcache", "class_name": "TieredConnector", "adapter_params": params}
    adapter = _create_native_plugin_l2_adapter(NativePluginL2AdapterConfig.from_dict(told))
    assert adapter._client._client.wait_ready(20)
    return adapter


@pytest.fixture
def adapter(daemon):
    made = adapter_for(daemon)
    yield made
    made.close()


def keys_of(count: int, **changes) -> list[ObjectKey]:
    fields = {"model_name": "some/model", "kv_rank": 3, **changes}
    return [ObjectKey(chunk_hash=bytes([n]) * 32, **fields) for n in range(count)]


def objects(count: int, seed: int | None, nbytes: int = CHUNK) -> list:
    made = [ALLOCATOR.allocate(torch.Size([nbytes]), torch.uint8) for _ in range(count)]
    if seed is not None:
        chance = torch.Generator().manual_seed(seed)
        for one in made:
            one.tensor.copy_(torch.randint(0, 255, (nbytes,), generator=chance, dtype=torch.uint8))
    else:
        for one in made:
            one.tensor.zero_()
    return made


def wait(descriptor: int, take):
    """What ``take`` gives once the adapter's own descriptor has told of it."""
    for _ in range(100):
        if select.select([descriptor], [], [], 20)[0]:
            os.eventfd_read(descriptor)
            if (found := take()) is not None:
                return found
    raise AssertionError("nothing was told")


def store(adapter, keys, found) -> bool:
    task = adapter.submit_store_task(keys, found)
    done = wait(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None)
    return done[task].is_successful()


def there(adapter, keys) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    told = wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    adapter.submit_unlock(keys)
    return [told.test(i) for i in range(len(keys))]


def load(adapter, keys, into) -> list[bool]:
    task = adapter.submit_load_task(keys, into)
    told = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    return [told.test(i) for i in range(len(keys))]


def test_chunks_are_found_by_key_and_come_back(adapter, daemon):
    keys, mine = keys_of(6), objects(4, seed=1)
    assert there(adapter, keys) == [False] * 6
    assert store(adapter, keys[:4], mine)
    # Each key by itself, not a run from the first on.
    mixed = [keys[5], *keys[2:4], keys[4], keys[0]]
    assert there(adapter, mixed) == [False, True, True, False, True]
    into = objects(5, seed=None)
    assert load(adapter, mixed, into) == [False, True, True, False, True]
    for one, other in zip((into[1], into[2], into[4]), (mine[2], mine[3], mine[0]), strict=True):
        assert torch.equal(one.tensor, other.tensor)
    # Another model, rank, group or salt is another chunk.
    for changes in ({"model_name": "other"}, {"kv_rank": 2}, {"object_group_id": 1}, {"cache_salt": "tenant"}):
        assert there(adapter, keys_of(4, **changes)) == [False] * 4


def test_more_than_the_buffer_has_room_for_is_stored_in_turns(daemon):
    adapter = adapter_for(daemon, buffer_bytes=8 * CHUNK)
    keys, mine = keys_of(30), objects(30, seed=2)
    assert store(adapter, keys, mine)
    into = objects(30, seed=None)
    assert load(adapter, keys, into) == [True] * 30
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(into, mine, strict=True))
    adapter.close()


def test_a_chunk_of_another_size_is_not_kept(adapter):
    keys = keys_of(2)
    assert not store(adapter, keys, [*objects(1, seed=3), *objects(1, seed=4, nbytes=CHUNK // 2)])
    assert there(adapter, keys) == [True, False]


def test_a_dead_daemon_is_a_miss_and_what_was_on_ssd_comes_back(adapter, daemon):
    keys, mine = keys_of(3), objects(3, seed=5)
    assert store(adapter, keys, mine)
    daemon.stop()
    assert load(adapter, keys, objects(3, seed=None)) == [False] * 3
    assert there(adapter, keys) == [False] * 3
    daemon.start()
    assert adapter._client._client.wait_ready(20)
    into = objects(3, seed=None)
    assert load(adapter, keys, into) == [True] * 3
    assert torch.equal(into[2].tensor, mine[2].tensor)
