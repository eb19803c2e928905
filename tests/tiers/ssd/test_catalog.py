"""The catalog of namespaces: two files, a line each; damage costs what it hits in both, and a torn end nothing."""

from __future__ import annotations

import errno
import random
from dataclasses import replace

import pytest

from kvstore.core.errors import CorruptBlock, TierUnavailable
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tiers.ssd import spaces as spaces_module
from kvstore.tiers.ssd.catalog import CATALOG_COPY, CATALOG_NAME, make_space, pack_catalog, unpack_catalog
from tests.tiers.ssd.test_format import CONFIG, MAKER

STRICT = replace(CONFIG, recovery="strict")


def specs(count):
    return [
        NamespaceSpec(model="m", dtype="float16", layers=1, kv_heads=1, head_dim=8, salt=bytes([i]))
        for i in range(count)
    ]


def packed(count):
    made = [make_space(i, spec, NamespacePolicy(), f"name {i}") for i, spec in enumerate(specs(count))]
    return made, pack_catalog(made)


def names_of(catalog):
    return {space.name for space in catalog.spaces}


def test_one_flipped_bit_anywhere_in_one_file_loses_nothing():
    made, data = packed(5)
    for position in range(0, len(data), 3):
        for bit in (position % 8,):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            for pair in ((bytes(bad), data), (data, bytes(bad))):
                assert names_of(unpack_catalog(*pair)) == {space.name for space in made}, (position, bit)


def test_one_flipped_bit_in_both_loses_at_most_what_it_hits():
    made, data = packed(5)
    for position in range(0, len(data), 2):
        bad = bytearray(data)
        bad[position] ^= 4
        left = names_of(unpack_catalog(bytes(bad), bytes(bad)))
        # A line feed that was hit makes one line of two.
        assert len(left) >= len(made) - 2, position


def test_random_bytes_raise_what_is_documented_and_nothing_else():
    _, data = packed(3)
    rng = random.Random(5)
    for _ in range(2000):
        bad = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            unpack_catalog(bytes(bad[: rng.randrange(len(bad) + 1)]), None)
        except CorruptBlock:
            continue


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_end_is_no_damage_and_is_cut_before_the_next_line(cut):
    disk = FaultyDisk()
    first, second = BlockMaker(), specs(2)[1]
    tier = SsdTier("memory", CONFIG, port=disk)
    list(tier.recover())
    tier.put_namespace(first.spec, NamespacePolicy(), "first")
    tier.write(first.namespace_id, first.chain([1], ROOT_PARENT), durable=True)
    killed = disk.crash(Crash.KILL)
    tier.close()
    torn = killed.image()[CATALOG_NAME]
    killed.overwrite(CATALOG_NAME, torn + b'0badc0de {"spec'[:cut])
    for _ in range(2):
        tier = SsdTier("memory", STRICT, port=killed)
        assert len(list(tier.recover())) == 1
        tier.put_namespace(second, NamespacePolicy(), "second")
        assert {name for _, _, name in tier.namespaces()} == {"first", "second"}
        tier.close()
        image = killed.image()
        assert image[CATALOG_NAME] == image[CATALOG_COPY]
        assert unpack_catalog(image[CATALOG_NAME], image[CATALOG_COPY]).lines


@pytest.mark.parametrize("gone", [[CATALOG_NAME], [CATALOG_COPY]])
def test_either_file_may_be_missing(gone):
    disk = FaultyDisk()
    tier = SsdTier("memory", CONFIG, port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "kept")
    tier.write(MAKER.namespace_id, MAKER.chain([1, 2], ROOT_PARENT), durable=True)
    tier.close()
    for name in gone:
        disk.unlink(name)
    tier = SsdTier("memory", CONFIG, port=disk)
    assert len(list(tier.recover())) == 2
    assert tier.report.quarantined == 0
    tier.close()


def test_namespaces_without_blocks_are_forgotten_by_a_start(monkeypatch):
    disk = FaultyDisk()
    tier = SsdTier("memory", CONFIG, port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "has blocks")
    tier.write(MAKER.namespace_id, MAKER.chain([1], ROOT_PARENT), durable=True)
    for i, spec in enumerate(specs(20)):
        tier.put_namespace(spec, NamespacePolicy(), f"empty {i}")
    tier.close()
    monkeypatch.setattr(spaces_module, "EMPTY_MAX", 3)
    tier = SsdTier("memory", CONFIG, port=disk)
    assert len(list(tier.recover())) == 1
    assert len(tier.namespaces()) == 4
    tier.close()
    kept = names_of(unpack_catalog(disk.image()[CATALOG_NAME], disk.image()[CATALOG_COPY]))
    assert kept == {"has blocks", "empty 17", "empty 18", "empty 19"}


def damaged_in_both():
    """A line of a namespace with a block, damaged in both files, and good lines behind it."""
    disk = FaultyDisk()
    tier = SsdTier("memory", CONFIG, port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "damaged")
    tier.write(MAKER.namespace_id, MAKER.chain([1], ROOT_PARENT), durable=True)
    for i, spec in enumerate(specs(3)):
        tier.put_namespace(spec, NamespacePolicy(), f"good {i}")
    tier.close()
    for name in (CATALOG_NAME, CATALOG_COPY):
        disk.overwrite(name, disk.image()[name].replace(b'"damaged"', b'"dxmaged"'))
    return disk


def test_damaged_lines_are_told_of_once():
    disk = damaged_in_both()
    with pytest.raises(TierUnavailable, match="lines of namespaces and its copy are damaged"):
        list(SsdTier("memory", STRICT, port=disk).recover())
    disk = damaged_in_both()
    tier = SsdTier("memory", CONFIG, port=disk)
    assert list(tier.recover()) == []
    tier.close()
    assert len([name for name in disk.image() if "damaged-namespaces" in name]) == 2
    tier = SsdTier("memory", STRICT, port=disk)
    assert list(tier.recover()) == []
    assert {name for _, _, name in tier.namespaces()} == {"good 0", "good 1", "good 2"}
    tier.close()


def test_damaged_lines_stay_on_a_full_disk():
    disk = damaged_in_both()
    tier = SsdTier("memory", CONFIG, port=disk)
    disk.fail = lambda _number, kind, name: (
        errno.ENOSPC if kind == "open" and name.startswith("namespaces") and "tmp" in name else 0
    )
    assert list(tier.recover()) == []
    assert tier.state.state == "ready"
    disk.fail = lambda *_: 0
    assert tier.usage().ledger_bytes == disk.used_bytes()
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "again")
    tier.close()
    tier = SsdTier("memory", STRICT, port=disk)
    assert list(tier.recover()) == []
    assert len(tier.namespaces()) == 4
    tier.close()


def test_a_damaged_copy_alone_is_set_aside_and_ends_no_start():
    disk = FaultyDisk()
    disk.overwrite("namespaces.copy", b"nothing that is valid")
    tier = SsdTier("memory", SsdConfig(capacity_bytes=1 << 20, compact_interval_s=None), port=disk)
    assert list(tier.recover()) == []
    assert tier.state.state == "ready"
    assert [name for name in disk.image() if name.startswith("quarantine/")]
    tier.close()
