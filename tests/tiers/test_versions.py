"""The version of a page rises before its range can be handed out again, and never otherwise."""

from __future__ import annotations

import mmap
import os
import random
import struct

import pytest

from kvstore.core.namespace import PAGE_BYTES as PAGE
from kvstore.tiers.arena import RangeAllocator
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import BufferArena, HostArena

ARENAS = (HostArena, MemfdDeviceArena, BufferArena)


@pytest.mark.parametrize("make", ARENAS)
def test_every_page_of_a_freed_range_rises_and_no_other(make):
    arena = make(1 << 20)
    pages = (1 << 20) // PAGE
    seen = [1] * pages
    assert [arena.versions[page] for page in range(pages)] == seen
    seed = 7
    rng, held = random.Random(seed), []
    for _ in range(300):
        nbytes = rng.randrange(1, 6 * PAGE)
        offset = arena.allocate(nbytes)
        if offset is not None:
            held.append((offset, nbytes))
        if held and (offset is None or rng.random() < 0.5):
            offset, nbytes = held.pop(rng.randrange(len(held)))
            arena.free(offset, nbytes)
            for page in range(offset // PAGE, (offset + nbytes + PAGE - 1) // PAGE):
                seen[page] += 1
        assert [arena.versions[page] for page in range(pages)] == seen, f"seed {seed}"
    arena.close()


def test_the_version_rises_before_the_range_can_be_handed_out_again():
    ranges = RangeAllocator(1 << 20)
    offset = ranges.allocate(PAGE)
    used = []
    ranges.free(offset, PAGE, lambda begin, nbytes: used.append((begin, nbytes, ranges.used)))
    assert used == [(offset, PAGE, PAGE)], "told while the range still counts as handed out"


def test_a_range_that_was_not_handed_out_raises_nothing():
    arena = BufferArena(1 << 16)
    offset = arena.allocate(PAGE)
    with pytest.raises(ValueError, match="not handed out"):
        arena.free(offset, 3 * PAGE)
    assert arena.versions[offset // PAGE] == 1
    arena.close()


def test_whoever_maps_the_arena_reads_the_versions_behind_it_and_can_not_write_those_of_host():
    arena = HostArena(1 << 20)
    fd = os.dup(arena.fd)
    try:
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(fd, arena.mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with mmap.mmap(fd, arena.mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            offset = arena.allocate(PAGE)
            at = arena.capacity_bytes + offset // PAGE * 8
            assert struct.unpack_from("<Q", mapped, at) == (1,)
            arena.free(offset, PAGE)
            assert struct.unpack_from("<Q", mapped, at) == (2,)
    finally:
        os.close(fd)
        arena.close()
