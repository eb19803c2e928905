"""Golden images of version 1: what the build writes, byte for byte, and what it reads back; other versions are refused.

The images were written once and are never made anew for the same version: a change that needs new ones needs a new
version number.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from crc32c import crc32c

from kvstore.core.errors import TierUnavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tiers.ssd.scrub import check_directory

GOLDEN = Path(__file__).parent / "golden"
MAKER = BlockMaker()
CONFIG = SsdConfig(
    capacity_bytes=1 << 20, read_threads=1, write_threads=1, commit_interval_s=None, compact_interval_s=None,
    io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072,
)  # fmt: skip


def make_images() -> dict[str, FaultyDisk]:
    """A run of three, one block, a drop, after a kill ("journal") and after a clean stop ("checkpoint")."""
    disk = FaultyDisk()
    tier = SsdTier("memory", CONFIG, port=disk)
    list(tier.recover())
    tier.put_namespace(MAKER.spec, NamespacePolicy(), "golden")
    handles = tier.write(MAKER.namespace_id, MAKER.chain([1, 2, 3], ROOT_PARENT), durable=True)
    tier.write(MAKER.namespace_id, MAKER.chain([4], ROOT_PARENT), durable=True)
    tier.drop(handles[2:])
    tier.flush()
    killed = disk.crash(Crash.KILL)
    tier.close()
    return {"journal": killed, "checkpoint": disk}


IMAGES = make_images()


def files_of(kind: str) -> dict[str, bytes]:
    """The golden files; trailing zeros are not kept in the repository."""
    found = {}
    for path in sorted((GOLDEN / kind).glob("*.bin")):
        name, _, size = path.name.removesuffix(".bin").partition("@")
        found[name] = path.read_bytes().ljust(int(size), b"\0")
    return found


@pytest.mark.parametrize("kind", ["journal", "checkpoint"])
def test_the_build_writes_the_golden_bytes(kind):
    written = {name: data for name, data in IMAGES[kind].image().items() if name != "LOCK"}
    # The catalog is of version 2; those of version 1 in these folders are read and no longer written.
    golden = files_of(kind) | files_of("catalog")
    assert written.keys() == golden.keys()
    for name, data in golden.items():
        assert written[name] == data, name


@pytest.mark.parametrize("catalog", [1, 2])
@pytest.mark.parametrize("kind", ["journal", "checkpoint"])
def test_golden_bytes_are_read(kind, catalog):
    disk = FaultyDisk()
    for name, data in (files_of(kind) | (files_of("catalog") if catalog == 2 else {})).items():
        disk.overwrite(name, data)
    assert check_directory(disk).good == 3
    tier = SsdTier("memory", CONFIG, port=disk)
    try:
        found = list(tier.recover())
        assert [one.key for one in found] == [MAKER.key(seed) for seed in (1, 2, 4)]
        for one, block in zip(found, [*MAKER.chain([1, 2], ROOT_PARENT), MAKER.block(4, ROOT_PARENT)], strict=True):
            into = memoryview(bytearray(len(block.stored)))
            assert tier.read([BlockRead(one.handle, one.key, into)]) == [ReadStatus.OK]
            assert into == block.stored
        assert [(spec, name) for spec, _, name in tier.namespaces()] == [(MAKER.spec, "golden")]
    finally:
        tier.close()


VERSIONS = {
    "segment-00000001": (8, 16),
    "journal-00000001": (8, 16),
    "checkpoint-00000002": (8, 60),
    "namespaces": (8, 20),
}
"""Where each file's version and the CRC that covers it are."""


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_is_refused_and_nothing_is_changed(name):
    disk = FaultyDisk()
    for file, data in files_of("journal" if name.startswith("journal") else "checkpoint").items():
        disk.overwrite(file, data)
    version_at, crc_at = VERSIONS[name]
    data = bytearray(disk.image()[name])
    struct.pack_into("<I", data, version_at, 2)
    struct.pack_into("<I", data, crc_at, crc32c(bytes(data[:crc_at])))
    disk.overwrite(name, bytes(data))
    before = {file: content for file, content in disk.image().items() if file != "LOCK"}
    tier = SsdTier("memory", CONFIG, port=disk)
    with pytest.raises(TierUnavailable, match=f"{name} has format version 2; this build reads version 1"):
        list(tier.recover())
    tier.close()
    assert {file: content for file, content in disk.image().items() if file != "LOCK"} == before


def test_a_check_finds_damage_and_changes_nothing():
    disk = IMAGES["checkpoint"].crash(Crash.KILL)
    name = "segment-00000001"
    data = bytearray(disk.image()[name])
    data[8192] ^= 1
    disk.overwrite(name, bytes(data))
    before = disk.image()
    report = check_directory(disk)
    assert (report.whole, report.blocks, report.good) == (False, 3, 2)
    assert report.corrupt == [{"key": MAKER.key(1).hex(), "cause": "a slice fails its checksum"}]
    assert disk.image() == before


def test_a_held_directory_is_not_checked():
    disk = FaultyDisk()
    tier = SsdTier("memory", CONFIG, port=disk)
    list(tier.recover())
    with pytest.raises(TierUnavailable, match="held by pid"):
        check_directory(disk)
    tier.close()
