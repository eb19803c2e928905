"""The allocator against a plain model of pages; holes join, sizes are exact, wrong frees are refused."""

from __future__ import annotations

import random

import pytest

from kvstore.core.namespace import PAGE_BYTES as PAGE
from kvstore.tiers.arena import RangeAllocator


def test_ranges_are_page_aligned_and_apart():
    ranges = RangeAllocator(10 * PAGE + 5)
    assert ranges.capacity == 10 * PAGE
    offsets = [ranges.allocate(n) for n in (1, PAGE, PAGE + 1)]
    assert offsets == [0, PAGE, 2 * PAGE]
    assert ranges.used == 4 * PAGE
    assert ranges.allocate(7 * PAGE) is None
    assert ranges.allocate(6 * PAGE) == 4 * PAGE
    assert ranges.allocate(1) is None


def test_the_smallest_hole_that_fits_is_taken():
    ranges = RangeAllocator(20 * PAGE)
    a, b, c, d = (ranges.allocate(n * PAGE) for n in (6, 1, 3, 1))
    ranges.free(a, 6 * PAGE)
    ranges.free(c, 3 * PAGE)
    assert ranges.allocate(3 * PAGE) == c
    assert ranges.allocate(4 * PAGE) == a
    assert (b, d) == (6 * PAGE, 10 * PAGE)


def test_what_was_not_handed_out_is_not_taken_back():
    ranges = RangeAllocator(4 * PAGE)
    offset = ranges.allocate(2 * PAGE)
    for wrong in ((offset + PAGE, PAGE), (offset, PAGE), (offset, 3 * PAGE), (3 * PAGE, PAGE)):
        with pytest.raises(ValueError, match="was not handed out"):
            ranges.free(*wrong)
    with pytest.raises(ValueError, match="at least 1 byte"):
        ranges.allocate(0)
    ranges.free(offset, 2 * PAGE)
    with pytest.raises(ValueError, match="was not handed out"):
        ranges.free(offset, 2 * PAGE)
    assert ranges.used == 0


@pytest.mark.parametrize("seed", range(6))
def test_against_a_model_of_pages(seed):
    chance = random.Random(seed)
    pages = 64
    ranges = RangeAllocator(pages * PAGE)
    owner: list[int | None] = [None] * pages
    held: dict[int, int] = {}
    for step in range(1500):
        if held and chance.random() < 0.5:
            offset = chance.choice(sorted(held))
            count = held.pop(offset)
            ranges.free(offset, count * PAGE)
            owner[offset // PAGE : offset // PAGE + count] = [None] * count
        else:
            count = chance.randint(1, 9)
            offset = ranges.allocate(count * PAGE)
            longest = max((len(run) for run in "".join("." if o is None else "#" for o in owner).split("#")), default=0)
            if offset is None:
                assert longest < count
                continue
            first = offset // PAGE
            assert owner[first : first + count] == [None] * count
            owner[first : first + count] = [step] * count
            held[offset] = count
        assert ranges.used == PAGE * sum(held.values())
    for offset, count in held.items():
        ranges.free(offset, count * PAGE)
    assert ranges.allocate(pages * PAGE) == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_holes_beside_a_range_are_those_that_nobody_has(seed):
    chance = random.Random(seed)
    for _ in range(200):
        ranges = RangeAllocator(24 * PAGE)
        held = []
        while (size := chance.randint(1, 4)) and (offset := ranges.allocate(size * PAGE)) is not None:
            held.append((offset, size * PAGE))
        chance.shuffle(held)
        for freed in held[: len(held) // 3]:
            ranges.free(*freed)
        for offset, nbytes in held[len(held) // 3 :]:
            begin = max([s + n for s, n in ranges._taken.items() if s + n <= offset], default=0)
            end = min([s for s in ranges._taken if s >= offset + nbytes], default=24 * PAGE)
            assert ranges.holes_beside(offset, offset + nbytes) == (offset - begin, end - offset - nbytes)


def test_stale_heap_entries_do_not_pile_up():
    ranges = RangeAllocator(64 * PAGE)
    first = ranges.allocate(PAGE)
    for _ in range(2000):
        a, b = ranges.allocate(PAGE), ranges.allocate(PAGE)
        ranges.free(a, PAGE)
        ranges.free(b, PAGE)
    ranges.free(first, PAGE)
    assert sum(map(len, ranges._heaps.values())) < 500
