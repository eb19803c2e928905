"""Coded slices: what comes back is what went in, in less space where it pays; damage is a miss; a golden image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import CorruptBlock
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import ROOT_PARENT, Codec
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.lossless import CODED_SLICE_BYTES_MAX, decode_slice, encode_slice, planes_of
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tiers.ssd.format import CodedSlices, ExtentHead, pack_extent_head, unpack_extent_head
from kvstore.tiers.ssd.scrub import check_directory

GOLDEN = Path(__file__).parent / "golden" / "lossless"
SPEC = NamespaceSpec(model="smooth", dtype="bfloat16", layers=3, kv_heads=2, head_dim=32, block_tokens=16)
LZ4 = NamespacePolicy(lossless="lz4")
CONFIG = SsdConfig(
    capacity_bytes=2 << 20, read_threads=1, write_threads=1, commit_interval_s=None, compact_interval_s=None,
    io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072,
)  # fmt: skip


class SmoothMaker(BlockMaker):
    """Blocks whose numbers have few exponents, as a channel of K has; those of a negative seed are noise."""

    def payload(self, seed: int, codec: Codec = Codec.RAW) -> bytes:
        slice_bytes, stride, stored_bytes = self.layout.of_codec(codec)
        data = np.frombuffer(super().payload(seed, codec)[: self.layout.units_of(codec) * stride], np.uint8).copy()
        slices = data.reshape(-1, stride)
        slices[:, slice_bytes:] = 0
        if seed >= 0:
            slices[:, 1:slice_bytes:2] = 0x3F
        return data.tobytes().ljust(stored_bytes - self.layout.header_bytes, b"\0")


MAKER = SmoothMaker(SPEC)


def open_tier(disk: FaultyDisk, **settings) -> SsdTier:
    return SsdTier("memory", replace(CONFIG, **settings), port=disk)


def written(disk: FaultyDisk, runs, policy: NamespacePolicy = LZ4) -> tuple[SsdTier, dict[bytes, bytes]]:
    """A tier with some chains, and their blocks by key."""
    tier, blocks = open_tier(disk), {}
    list(tier.recover())
    tier.put_namespace(SPEC, policy, "lossless")
    for seeds in runs:
        chain = MAKER.chain(list(seeds), ROOT_PARENT)
        tier.write(MAKER.namespace_id, chain, durable=True)
        blocks |= {block.key: bytes(block.stored) for block in chain}
    return tier, blocks


def check(tier: SsdTier, found, blocks: dict[bytes, bytes]) -> int:
    """Every block is right, or corrupt; returns how many are right."""
    right = 0
    for one in found:
        into = memoryview(bytearray(b"\xaa" * len(blocks[one.key])))
        (status,) = tier.read([BlockRead(one.handle, one.key, into)])
        assert status in (ReadStatus.OK, ReadStatus.CORRUPT)
        if status is ReadStatus.OK:
            assert bytes(into) == blocks[one.key]
            right += 1
    return right


@pytest.mark.parametrize("end", ["kill", "close"])
def test_coded_blocks_come_back_in_less_space(end):
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(5), range(10, 11)])
    live, saved = tier.usage().live_bytes, tier.state.counters["coded_saved_bytes"]
    assert tier.state.counters["coded_extents"] == 2
    assert saved > 0.2 * live
    left = disk.crash(Crash.KILL) if end == "kill" else disk
    tier.close()
    assert check_directory(left.crash(Crash.KILL)).good == len(blocks)
    again = open_tier(left)
    found = list(again.recover())
    assert (again.usage().live_bytes, again.state.counters["coded_saved_bytes"]) == (live, saved)
    assert again.usage().coded_saved_bytes == saved
    assert check(again, found, blocks) == len(blocks)
    again.drop([one.handle for one in found])
    assert again.state.counters["coded_saved_bytes"] == 0
    again.close()


def test_a_layer_of_a_coded_run_is_one_read():
    tier, _ = written(FaultyDisk(), [])
    chain = MAKER.chain(list(range(8)), ROOT_PARENT)
    handles = tier.write(MAKER.namespace_id, chain, durable=True)
    stride, slice_bytes = MAKER.layout.raw_slice_stride, MAKER.layout.raw_slice_bytes
    for begin, end in ((1, 2), (0, 2), (2, 3)):
        before = tier.state.counters.get("read_ios", 0)
        into = [memoryview(bytearray((end - begin - 1) * stride + slice_bytes)) for _ in chain]
        reads = [BlockRead(h, b.key, to, (begin, end)) for h, b, to in zip(handles, chain, into, strict=True)]
        assert tier.read(reads) == [ReadStatus.OK] * 8
        assert tier.state.counters["read_ios"] == before + 1
        for block, data in zip(chain, into, strict=True):
            assert data == block.stored[MAKER.layout.header_bytes + begin * stride :][: len(data)]
    tier.close()


def test_noise_and_other_namespaces_stay_as_they_are():
    for seeds, policy in (([-1, -2, -3], LZ4), ([1, 2, 3], NamespacePolicy())):
        disk = FaultyDisk()
        tier, blocks = written(disk, [seeds], policy)
        counters = tier.state.counters
        assert (counters["coded_extents"], counters["coded_saved_bytes"]) == (0, 0)
        tier.close()
        again = open_tier(disk)
        assert check(again, list(again.recover()), blocks) == 3
        again.close()


def test_noise_beside_smooth_blocks_is_kept_as_it_is():
    tier, blocks = written(FaultyDisk(), [[1, -2, 3, 4]])
    assert tier.state.counters["coded_extents"] == 1
    lengths = next(iter(tier._core.headers._entries.values())).coded.lengths
    assert (lengths[:, 1] == MAKER.layout.raw_slice_bytes).all()
    assert (lengths[:, [0, 2, 3]] < 0.95 * MAKER.layout.raw_slice_bytes).all()
    left = tier._port.crash(Crash.KILL)
    tier.close()
    again = open_tier(left)
    assert check(again, list(again.recover()), blocks) == 4
    again.close()


def test_rewriting_keeps_coded_blocks():
    tier, blocks = written(FaultyDisk(), [range(number, number + 4) for number in range(0, 80, 4)])
    with tier._core.lock:
        handles = {tier._core.table.key(h): h for h in range(len(blocks))}
    gone = [MAKER.key(seed) for seed in range(80) if seed % 4 in (0, 2)]
    tier.drop([handles[key] for key in gone])
    assert tier.compact(0.1).segments
    kept = {key: data for key, data in blocks.items() if key not in gone}
    reads = [BlockRead(handles[key], key, memoryview(bytearray(len(data)))) for key, data in kept.items()]
    assert tier.read(reads) == [ReadStatus.OK] * len(kept)
    assert [bytes(read.into) for read in reads] == list(kept.values())
    assert tier.state.counters["coded_saved_bytes"] > 0
    tier.close()


def test_salvage_adopts_coded_blocks_that_are_whole():
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(3), range(10, 12)])
    tier.close()
    image = disk.image()
    disk.overwrite("checkpoint-00000002", b"lost")
    data = bytearray(image["segment-00000001"])
    data[4096 + 4096 + 10] ^= 1
    disk.overwrite("segment-00000001", bytes(data))
    again = open_tier(disk)
    found = list(again.recover())
    assert {one.key for one in found} == blocks.keys() - {MAKER.key(0)}
    assert check(again, found, blocks) == 4
    again.close()


@pytest.mark.parametrize("end", ["kill", "close"])
def test_damage_is_a_miss_never_other_bytes(end):
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(2), range(10, 11)])
    image = disk.crash(Crash.KILL) if end == "kill" else disk
    tier.close()
    misses = 0
    for name, data in image.image().items():
        if name == "LOCK":
            continue
        step = 5 if name.startswith(("checkpoint", "journal")) else 97
        for at in range(0, min(len(data), 24576), step):
            damaged = image.crash(Crash.KILL)
            damaged.overwrite(name, data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            misses += len(blocks) - reopened(damaged, blocks)
    assert misses > 20


def reopened(disk: FaultyDisk, blocks: dict[bytes, bytes]) -> int:
    tier = open_tier(disk)
    try:
        right = check(tier, list(tier.recover()), blocks)
        seen = tier.report.quarantined + tier.state.counters.get("corrupt", 0) + tier.report.cut_bytes
        assert seen or right == len(blocks)
        return right
    except Exception as error:
        if "format version" in str(error):
            return 0
        raise
    finally:
        tier.close()


def head_of(disk: FaultyDisk) -> ExtentHead:
    return unpack_extent_head(memoryview(disk.image()["segment-00000001"])[4096:])


def shifted(coded: CodedSlices, nbytes: int) -> CodedSlices:
    """The first slice longer, the others shorter by as much in all."""
    lengths = coded.lengths.copy()
    lengths[0, 0] += nbytes
    for at in range(1, 6):
        lengths[0, at] -= nbytes // 5
    return replace(coded, lengths=lengths)


FORGED = {
    "one length above the slice": lambda coded: shifted(coded, 2500),
    "planes that are not known": lambda coded: replace(coded, planes=3),
    "a length of nothing": lambda coded: replace(coded, lengths=coded.lengths * 0),
    "lengths above the slice": lambda coded: replace(coded, lengths=coded.lengths + 5000),
    "lengths that end before the extent": lambda coded: replace(coded, lengths=coded.lengths // 40 + 1),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_a_head_with_impossible_lengths_is_corrupt_though_its_checksums_agree(forge):
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(6)])
    tier.close()
    head = head_of(disk)
    data = bytearray(disk.image()["segment-00000001"])
    forged = pack_extent_head(replace(head, coded=forge(head.coded)))
    with pytest.raises(CorruptBlock, match="coded slices end at"):
        unpack_extent_head(memoryview(forged))
    data[4096 : 4096 + len(forged)] = forged
    disk.overwrite("segment-00000001", bytes(data))
    assert reopened(disk, blocks) == 0


def test_a_head_with_shifted_lengths_is_corrupt_by_its_slices():
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(6)])
    tier.close()
    head = head_of(disk)
    lengths = head.coded.lengths.copy()
    lengths[0, 0] += 7
    lengths[0, 1] -= 7
    data = bytearray(disk.image()["segment-00000001"])
    forged = pack_extent_head(replace(head, coded=replace(head.coded, lengths=lengths)))
    data[4096 : 4096 + len(forged)] = forged
    disk.overwrite("segment-00000001", bytes(data))
    # Blocks 0 and 1 are read from wrong places; the others lie where they lay.
    assert reopened(disk, blocks) == 4


def test_damage_of_a_slice_that_is_not_coded_is_a_miss():
    disk = FaultyDisk()
    tier, blocks = written(disk, [[1, -2, 3]])
    tier.close()
    head = head_of(disk)
    start, nbytes = head.coded.places(4096 + head.shape.head_bytes, 1)[1]
    assert nbytes == head.shape.slice_bytes
    data = bytearray(disk.image()["segment-00000001"])
    data[start + nbytes - 1] ^= 0x80
    disk.overwrite("segment-00000001", bytes(data))
    assert reopened(disk, blocks) == 2


def test_the_coded_bytes_of_a_corrupt_block_are_set_aside():
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(3)])
    tier.close()
    head = head_of(disk)
    places = head.coded.places(4096 + head.shape.head_bytes, 1)
    data = bytearray(disk.image()["segment-00000001"])
    data[places[0][0] + 20] ^= 1
    disk.overwrite("segment-00000001", bytes(data))
    again = open_tier(disk)
    assert check(again, list(again.recover()), blocks) == 2
    (entry,) = again.quarantine()
    assert entry.key == MAKER.key(1)
    kept = disk.image()[entry.file][-entry.bytes :]
    assert kept == b"".join(bytes(data[start : start + nbytes]) for start, nbytes in places)
    again.close()


def test_padding_reads_as_zeros():
    spec = replace(SPEC, head_dim=10, layers=12)
    maker = SmoothMaker(spec)
    assert maker.layout.raw_slice_bytes < maker.layout.raw_slice_stride
    tier = open_tier(FaultyDisk())
    list(tier.recover())
    tier.put_namespace(spec, LZ4, "padded")
    chain = maker.chain([1, -2, 3, 4, 5], ROOT_PARENT)
    handles = tier.write(maker.namespace_id, chain, durable=True)
    assert tier.state.counters["coded_extents"] == 1
    into = [memoryview(bytearray(b"\xaa" * len(block.stored))) for block in chain]
    reads = [BlockRead(h, block.key, data) for h, block, data in zip(handles, chain, into, strict=True)]
    assert tier.read(reads) == [ReadStatus.OK] * 5
    assert [bytes(data) for data in into] == [bytes(block.stored) for block in chain]
    tier.close()


@given(st.binary(min_size=64, max_size=4096), st.sampled_from([1, 2, 4]))
def test_any_bytes_come_back_through_the_coding(data, planes):
    data = data[: len(data) // 4 * 4] * 3
    coded = memoryview(encode_slice(memoryview(data), planes))
    if len(coded) == len(data):
        assert coded == data
        return
    into = memoryview(bytearray(len(data)))
    decode_slice(coded, planes, into)
    assert into == data
    assert len(coded) <= 0.95 * len(data)


@given(st.binary(max_size=512), st.sampled_from([1, 2, 4]))
def test_bytes_that_nobody_coded_are_corrupt(data, planes):
    into = memoryview(bytearray(1 << 16))
    with pytest.raises(CorruptBlock):
        decode_slice(memoryview(data), planes, into)


def test_planes_follow_the_numbers():
    sizes = {dtype: planes_of(replace(SPEC, dtype=dtype), Codec.RAW, 1024) for dtype in ("bfloat16", "float32")}
    assert sizes == {"bfloat16": 2, "float32": 4}
    assert planes_of(replace(SPEC, codec="int8"), Codec.INT8, 1024) == 1
    assert planes_of(replace(SPEC, opaque_slice_bytes=1000), Codec.RAW, 1000) == 1


def test_slices_too_large_to_decode_in_one_piece_stay_as_they_are():
    spec = replace(SPEC, opaque_slice_bytes=CODED_SLICE_BYTES_MAX + 512, layers=1)
    maker = BlockMaker(spec)
    tier = open_tier(FaultyDisk(), capacity_bytes=64 << 20)
    list(tier.recover())
    tier.put_namespace(spec, LZ4, "large")
    tier.write(maker.namespace_id, maker.chain([1], ROOT_PARENT), durable=True)
    assert tier.state.counters["coded_extents"] == 0
    tier.close()


def test_the_golden_extent_is_written_and_read():
    disk = FaultyDisk()
    tier, blocks = written(disk, [range(2)])
    killed = disk.crash(Crash.KILL)
    tier.close()
    for kind, image in (("journal", killed), ("checkpoint", disk)):
        for name in sorted(path.name for path in (GOLDEN / kind).iterdir()):
            file, _, size = name.removesuffix(".bin").partition("@")
            golden = (GOLDEN / kind / name).read_bytes().ljust(int(size), b"\0")
            assert image.image()[file] == golden, name
            image.overwrite(file, golden)
        again = open_tier(image.crash(Crash.KILL))
        assert check(again, list(again.recover()), blocks) == 2
        again.close()
