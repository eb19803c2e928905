"""Many namespaces, and what becomes of those of which nothing is left: no count of them ends a start."""

from __future__ import annotations

import errno
import struct
from dataclasses import replace

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.store.config import StoreConfig
from kvstore.store.embedded import build_store
from kvstore.testing.blocks import SMALL_SPEC, BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier, checkpoint, recover
from kvstore.tiers.ssd import spaces as spaces_module
from kvstore.tiers.ssd.catalog import CATALOG_COPY, CATALOG_NAME, make_space, unpack_catalog

CONFIG = SsdConfig(
    capacity_bytes=64 << 20, segment_bytes=65536, commit_interval_s=None, compact_interval_s=None, io_bytes=65536
)
STRICT = replace(CONFIG, recovery="strict")
TENANTS = [BlockMaker(replace(SMALL_SPEC, salt=i.to_bytes(4, "little"))) for i in range(40)]


def opened(disk, config=CONFIG):
    tier = SsdTier("memory", config, port=disk)
    return tier, list(tier.recover())


def put(tier, maker, name=""):
    tier.put_namespace(maker.spec, NamespacePolicy(), name)


def write(tier, maker, seed=1):
    put(tier, maker)
    return tier.write(maker.namespace_id, maker.chain([seed], ROOT_PARENT), durable=True)[0]


def holds(tier, handle, maker, seed=1):
    into = memoryview(bytearray(len(maker.block(seed, ROOT_PARENT).stored)))
    read = BlockRead(handle, maker.key(seed), into, namespace_id=maker.namespace_id)
    return tier.read([read]) == [ReadStatus.OK] and bytes(into) == maker.block(seed, ROOT_PARENT).stored


def in_catalog(disk):
    image = disk.image()
    return {space.namespace_id for space in unpack_catalog(image[CATALOG_NAME], image[CATALOG_COPY]).spaces}


@pytest.mark.parametrize("count", [65_535, 65_536, 70_000])
def test_indices_beyond_16_bits_are_written_and_found_again(count):
    disk = FaultyDisk()
    tier, _ = opened(disk)
    core = tier._core
    # As if so many had been put before; only the last is real.
    filler = make_space(0, TENANTS[1].spec, NamespacePolicy(), "")
    core.spaces = [filler] * count
    handle = write(tier, TENANTS[0])
    assert core.space_index[TENANTS[0].namespace_id] == count
    assert holds(tier, handle, TENANTS[0])
    killed = disk.crash(Crash.KILL)
    tier.close()
    for image in (disk, killed):
        disk_tier = SsdTier("memory", STRICT, port=image)
        config = StoreConfig(loader_threads=0, writer_threads=0, close_flush_ms=0)
        store = build_store(config, host_bytes=1 << 16, device_bytes=0, disk=disk_tier)
        assert disk_tier.report.blocks == 1
        store.close()


def test_a_catalog_of_65536_namespaces_ends_no_start(monkeypatch):
    # Their lines are read by the like: a second for each run would be spent on parsing.
    filler = make_space(0, TENANTS[1].spec, NamespacePolicy(), "")
    unpack = recover.unpack_catalog

    def many(*files):
        found = unpack(*files)
        mine = make_space(65_535, found.spaces[0].spec, NamespacePolicy(), "")
        return type(found)([filler] * 65_535 + [mine])

    disk = FaultyDisk()
    tier, _ = opened(disk)
    write(tier, TENANTS[0])
    tier.close()
    monkeypatch.setattr(recover, "unpack_catalog", many)
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 1 << 20)
    tier, found = opened(disk)
    assert tier.state.state == "ready"
    assert [one.key for one in found] == [TENANTS[0].key(1)]
    assert holds(tier, found[0].handle, TENANTS[0])
    tier.close()


def test_checkpoints_of_more_namespaces_than_16_bits_tell_are_of_version_2(monkeypatch):
    monkeypatch.setattr(checkpoint, "NARROW_MAX", 3)
    disk = FaultyDisk()
    tier, _ = opened(disk)
    for number, version in ((3, 1), (9, 2)):
        for maker in TENANTS[:number]:
            write(tier, maker, number)
        tier.close()
        (name,) = [name for name in disk.image() if name.startswith("checkpoint-")]
        assert struct.unpack_from("<I", disk.image()[name], 8) == (version,)
        tier, found = opened(disk, STRICT)
        assert len(found) == (3 if number == 3 else 12)
        makers = {maker.namespace_id: maker for maker in TENANTS}
        for one in found:
            seed = next(seed for seed in (3, 9) if makers[one.namespace_id].key(seed) == one.key)
            assert holds(tier, one.handle, makers[one.namespace_id], seed)
    tier.close()


def test_a_checkpoint_names_only_namespaces_of_its_blocks():
    disk = FaultyDisk()
    tier, _ = opened(disk)
    for maker in TENANTS[:20]:
        put(tier, maker)
    write(tier, TENANTS[7])
    tier.close()
    (name,) = [name for name in disk.image() if name.startswith("checkpoint-")]
    assert struct.unpack_from("<I", disk.image()[name], 28) == (1,)
    tier, found = opened(disk, STRICT)
    assert [one.namespace_id for one in found] == [TENANTS[7].namespace_id]
    tier.close()


def test_namespaces_come_and_go_without_a_start_between(monkeypatch):
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 2)
    disk = FaultyDisk()
    tier, _ = opened(disk)
    kept = write(tier, TENANTS[0])
    for maker in TENANTS[1:]:
        handle = write(tier, maker)
        assert holds(tier, handle, maker)
        tier.drop([handle], [(maker.namespace_id, maker.key(1))])
        # A kill at any time finds what is there, and nothing that it can not explain.
        again, found = opened(disk.crash(Crash.KILL), STRICT)
        assert TENANTS[0].namespace_id in {one.namespace_id for one in found}
        again.close()
    assert len(tier._core.spaces) < 12
    assert len(in_catalog(disk)) < 12
    assert holds(tier, kept, TENANTS[0])
    last = write(tier, TENANTS[1], 5)
    assert holds(tier, last, TENANTS[1], 5)
    tier.close()
    tier, found = opened(disk, STRICT)
    assert {one.key for one in found} == {TENANTS[0].key(1), TENANTS[1].key(5)}
    tier.close()


def test_a_namespace_with_a_write_under_way_keeps_its_index(monkeypatch):
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 1)
    disk = FaultyDisk()
    tier, _ = opened(disk)
    put(tier, TENANTS[0])
    plain = tier._writer.write_runs

    def write_runs(runs):
        monkeypatch.setattr(tier._writer, "write_runs", plain)
        for maker in TENANTS[1:20]:
            put(tier, maker)
        plain(runs)

    monkeypatch.setattr(tier._writer, "write_runs", write_runs)
    (handle,) = tier.write(TENANTS[0].namespace_id, TENANTS[0].chain([1], ROOT_PARENT), durable=True)
    assert holds(tier, handle, TENANTS[0])
    assert TENANTS[0].namespace_id in in_catalog(disk)
    assert len(tier._core.spaces) < 10
    tier.close()


def test_what_a_start_forgot_is_kept_again_before_its_next_block(monkeypatch):
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 100)
    disk = FaultyDisk()
    tier, _ = opened(disk)
    for maker in TENANTS[:10]:
        put(tier, maker)
    tier.close()
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 2)
    tier, _ = opened(disk)
    with pytest.raises(InvalidArgument):
        tier.write(TENANTS[0].namespace_id, TENANTS[0].chain([1], ROOT_PARENT), durable=True)
    write(tier, TENANTS[0])
    tier.close()
    tier, found = opened(disk, STRICT)
    assert [one.namespace_id for one in found] == [TENANTS[0].namespace_id]
    tier.close()


def test_whatever_recovery_raises_ends_no_start(monkeypatch):
    disk = FaultyDisk()
    tier, _ = opened(disk)
    write(tier, TENANTS[0])
    tier.close()

    def broken(*_):
        raise OverflowError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(recover.Replay, "finish", broken)
        tier, found = opened(disk)
        assert found == []
        assert tier.state.state == "degraded"
        assert "a bug" in tier.state.last_error
        tier.close()
    tier, found = opened(disk, STRICT)
    assert len(found) == 1
    tier.close()


def with_empty_ones(monkeypatch, count=30):
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 100)
    disk = FaultyDisk()
    tier, _ = opened(disk)
    handle = write(tier, TENANTS[0])
    for maker in TENANTS[1:count]:
        put(tier, maker)
    tier.close()
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 2)
    return disk, handle


def test_a_full_disk_keeps_empty_namespaces_and_ends_no_start(monkeypatch):
    disk, _ = with_empty_ones(monkeypatch)
    tier = SsdTier("memory", CONFIG, port=disk)
    disk.fail = lambda _number, kind, name: errno.ENOSPC if kind == "open" and name == f"{CATALOG_NAME}.tmp" else 0
    assert len(list(tier.recover())) == 1
    assert tier.state.state == "ready"
    disk.fail = lambda *_: 0
    assert tier.usage().ledger_bytes == disk.used_bytes()
    put(tier, TENANTS[35])
    assert len(in_catalog(disk)) == 4
    tier.close()


def test_empty_namespaces_cost_no_blocks_under_a_small_cap(monkeypatch):
    disk, _ = with_empty_ones(monkeypatch)
    seen = []
    monkeypatch.setattr(recover, "forget_over_cap", lambda core, _: seen.append(core.ledger.file_bytes(CATALOG_NAME)))
    before = len(disk.image()[CATALOG_NAME])
    tier, found = opened(disk)
    assert len(found) == 1
    assert seen[0] < before
    assert len(tier._core.spaces) == 30
    assert len({space.namespace_id for space in tier._core.spaces}) == 3
    tier.close()
