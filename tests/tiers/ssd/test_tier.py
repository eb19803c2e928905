"""Write, read, drop and reopen on a real directory."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise

import pytest

from kvstore.core.errors import InvalidArgument, TierUnavailable
from kvstore.core.types import ROOT_PARENT, Codec
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier, reclaim

MIB = 1 << 20


def test_blocks_come_back_whole_after_a_restart(bench):
    bench.open()
    handles = bench.write(range(10))
    blocks = bench.maker.chain(list(range(10)), ROOT_PARENT)
    assert bench.read(handles, blocks) == [bytes(block.stored) for block in blocks]
    bench.open()
    assert [(one.key, one.parent, one.codec) for one in bench.found] == [(b.key, b.parent, b.codec) for b in blocks]
    assert bench.read([one.handle for one in bench.found], blocks) == [bytes(block.stored) for block in blocks]
    assert bench.tier.report.blocks == 10


def test_a_range_of_layers_is_read_alone(bench):
    bench.open()
    handles = bench.write(range(4))
    blocks = bench.maker.chain(list(range(4)), ROOT_PARENT)
    layout = bench.maker.layout
    stride = layout.raw_slice_stride
    into = [memoryview(bytearray(2 * stride)) for _ in blocks]
    reads = [BlockRead(h, b.key, data, (1, 3)) for h, b, data in zip(handles, blocks, into, strict=True)]
    assert bench.tier.read(reads) == [ReadStatus.OK] * 4
    begin = layout.header_bytes + stride
    assert [bytes(data) for data in into] == [bytes(b.stored[begin : begin + 2 * stride]) for b in blocks]


def test_a_drop_is_gone_and_stays_gone(bench):
    bench.open()
    handles = bench.write(range(6))
    blocks = bench.maker.chain(list(range(6)), ROOT_PARENT)
    bench.tier.drop(handles[3:])
    bench.tier.drop(handles[3:])
    assert bench.read(handles, blocks)[3:] == [ReadStatus.GONE] * 3
    bench.tier.flush()
    bench.open()
    assert [one.key for one in bench.found] == [block.key for block in blocks[:3]]


def test_an_old_handle_never_reads_a_new_block(bench):
    bench.open()
    (old,) = bench.write([1])
    bench.tier.drop([old])
    (new,) = bench.write([2])
    assert new == old
    assert bench.read([old], [bench.maker.block(1, ROOT_PARENT)]) == [ReadStatus.GONE]


def test_codecs_mix_in_one_run(bench):
    bench.open()
    first = bench.maker.chain([1, 2], ROOT_PARENT)
    second = bench.maker.chain([3], first[-1].key, Codec.INT8) if bench.maker.spec.codec == "int8" else []
    bench.write([1])
    blocks = first + second
    handles = bench.tier.write(bench.maker.namespace_id, blocks, durable=True)
    assert bench.read(handles, blocks) == [bytes(block.stored) for block in blocks]


def test_a_second_holder_is_refused_with_the_pid(bench):
    bench.open()
    with pytest.raises(TierUnavailable, match=f"held by pid {os.getpid()}"):
        SsdTier(bench.directory, SsdConfig(**bench.settings))


def test_the_ledger_equals_du(bench):
    bench.open()
    bench.write(range(20))
    for _ in range(2):
        du = subprocess.run(["du", "-s", "-B1", bench.directory], capture_output=True, text=True, check=True)
        assert bench.tier.used_bytes == bench.tier.usage().ledger_bytes == int(du.stdout.split()[0])
        bench.open()


def test_a_block_of_a_wrong_header_is_refused(bench):
    bench.open()
    bench.write([1])
    block = bench.maker.block(2, ROOT_PARENT)
    other = type(block)(bench.maker.key(3), ROOT_PARENT, Codec.RAW, block.stored)
    with pytest.raises(InvalidArgument, match="stored"):
        bench.tier.write(bench.maker.namespace_id, [other], durable=True)


def test_reclaim_gives_dropped_space_back_and_keeps_handles(make_bench):
    bench = make_bench(capacity_bytes=4 * 1024 * 1024)
    bench.open()
    seeds = list(range(400))
    handles = [bench.write([seed])[0] for seed in seeds]
    blocks = [bench.maker.block(seed, ROOT_PARENT) for seed in seeds]
    bench.tier.drop([handle for seed, handle in zip(seeds, handles, strict=True) if seed % 4])
    before = bench.tier.used_bytes
    assert bench.tier.compact(0.1).bytes_freed > 0
    assert bench.tier.used_bytes < before
    assert bench.read(handles[::4], blocks[::4]) == [bytes(block.stored) for block in blocks[::4]]
    bench.open()
    assert {one.key for one in bench.found} == {block.key for block in blocks[::4]}
    by_key = {one.key: one.handle for one in bench.found}
    kept = blocks[::4]
    assert bench.read([by_key[b.key] for b in kept], kept) == [bytes(block.stored) for block in kept]


def test_a_large_extent_is_rewritten_in_parts(bench, monkeypatch):
    monkeypatch.setattr(reclaim, "BATCH_BYTES", 16384)
    monkeypatch.setattr(reclaim, "READ_BYTES", 8192)
    bench.open()
    handles = bench.write(range(40))
    blocks = bench.maker.chain(list(range(40)), ROOT_PARENT)
    bench.tier.drop(handles[20:])
    # More than there will ever be: everything that is dead to a tenth is rewritten, the open segment too.
    bench.tier.reclaim(bench.tier.capacity_bytes)
    assert bench.tier.state.counters["rewritten_bytes"] >= 20 * bench.maker.layout.layers * 512
    assert bench.read(handles[:20], blocks[:20]) == [bytes(block.stored) for block in blocks[:20]]
    bench.open()
    parents = {one.key: one.parent for one in bench.found}
    assert all(parents[block.key] == block.parent for block in blocks[:20])


def test_compaction_ends_and_leaves_whole_segments_alone(make_bench):
    bench = make_bench(capacity_bytes=4 * MIB, fragmentation=0.01)
    bench.open()
    for seed in range(100):
        bench.write([seed])
    for _ in range(3):
        bench.tier.housekeeping()
        assert bench.tier.compact(0.0).bytes_rewritten == 0
    assert bench.tier.usage().write_amplification == 1.0


def test_a_compaction_ends_when_it_is_told(make_bench):
    bench = make_bench(capacity_bytes=4 * MIB, fragmentation=0.9)
    bench.open()
    handles = [handle for seed in range(100) for handle in bench.write([seed])]
    bench.tier.drop(handles[::2])
    assert bench.tier.compact(0.1, lambda: True).segments == 0
    asked = iter([False, False, True])
    assert bench.tier.compact(0.1, lambda: next(asked)).segments == 1
    assert bench.tier.compact(0.1).segments > 0


def test_a_handle_that_names_another_block_by_now_is_not_dropped(bench):
    bench.open()
    (handle,) = bench.write([1])
    bench.tier.drop([handle], [(bench.maker.namespace_id, bench.maker.key(1))])
    assert bench.write([2]) == [handle]
    bench.tier.drop([handle], [(bench.maker.namespace_id, bench.maker.key(1))])
    assert bench.read([handle], [bench.maker.block(2, ROOT_PARENT)]) == [
        bytes(bench.maker.block(2, ROOT_PARENT).stored)
    ]
    bench.tier.drop([handle], [(bench.maker.namespace_id, bench.maker.key(2))])
    assert bench.read([handle], [bench.maker.block(2, ROOT_PARENT)]) == [ReadStatus.GONE]


def test_compaction_ends_within_a_segment_when_it_is_told_to(make_bench, monkeypatch):
    monkeypatch.setattr("kvstore.tiers.ssd.reclaim.READ_BYTES", 8192)
    bench = make_bench(capacity_bytes=4 * MIB)
    tier = bench.open()
    handles = [bench.write([seed])[0] for seed in range(120)]
    tier.drop([handle for seed, handle in enumerate(handles) if seed % 2])
    tier.flush()
    asked = []

    def stop():
        asked.append(tier.state.counters.get("rewritten_bytes", 0))
        return len(asked) > 6

    report = tier.compact(0.0, stop)
    assert report.segments == 0, "the first segment was not done"
    assert 0 < report.bytes_rewritten == asked[-1]
    assert max(after - before for before, after in pairwise(asked)) <= 4 * 8192
    # What was moved is where it was moved to, and the rest is where it was.
    blocks = [bench.maker.block(seed, ROOT_PARENT) for seed in range(0, 120, 2)]
    assert bench.read(handles[::2], blocks) == [bytes(block.stored) for block in blocks]
    assert tier.compact(0.0).bytes_rewritten


def test_the_end_of_the_tier_ends_a_compaction(bench):
    tier = bench.open()
    handles = [bench.write([seed])[0] for seed in range(40)]
    tier.drop(handles[::2])
    tier.flush()
    tier._core.closed = True
    with pytest.raises(TierUnavailable):
        tier.compact(0.0)
    tier._core.closed = False
    rewrite = tier._reclaimer._rewrite

    def closing(segment, stop):
        tier._core.closed = True
        try:
            return rewrite(segment, stop)
        finally:
            tier._core.closed = False

    tier._reclaimer._rewrite = closing
    assert tier.compact(0.0).bytes_rewritten == 0


def test_a_long_drop_holds_the_lock_for_few_blocks_at_a_time(bench):
    tier = bench.open()
    handles = bench.write(range(1100))
    frames, submit = [], tier._committer.submit
    tier._committer.submit = lambda records, *rest: (frames.append(len(records)), submit(records, *rest))[1]
    tier.drop(handles, [(bench.maker.namespace_id, bench.maker.key(seed)) for seed in range(1100)])
    # A record is a head of 8 bytes, and 10 bytes a block.
    assert frames == [8 + 10 * 512, 8 + 10 * 512, 8 + 10 * 76]
    bench.close()
    bench.open(recovery="strict")
    assert bench.found == []
