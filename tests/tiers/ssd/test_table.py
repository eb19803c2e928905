"""What the tables take: columns that are narrow, and keys that are there once however many name them."""

from __future__ import annotations

import pytest

from kvstore.core.types import ROOT_PARENT

BLOCK_BYTES = 14
EXTENT_BYTES = 44


@pytest.fixture(params=["journal", "checkpoint"])
def recovered(request, bench):
    """A tier of 600 blocks, each committed by itself in chains of 12, after a restart that read one or the other."""
    bench.open()
    for chain in range(0, 600, 12):
        parent = ROOT_PARENT
        for seed in range(chain, chain + 12):
            bench.write([seed], parent=parent, durable=False)
            parent = bench.maker.key(seed)
    bench.tier.flush()
    if request.param == "checkpoint":
        bench.open()
    bench.open()
    return bench


def test_a_key_is_one_object_for_blocks_parents_and_whoever_was_told(recovered):
    table = recovered.tier._core.table
    keys = {id(key) for key in table.block_key}
    assert len(keys) == len(recovered.found) == 600
    assert {id(one.key) for one in recovered.found} == keys
    roots = [parent for parent in table.extent_parent if parent is ROOT_PARENT]
    others = [parent for parent in table.extent_parent if parent is not ROOT_PARENT]
    assert (len(roots), len(others)) == (50, 550)
    assert all(id(parent) in keys for parent in others)
    assert all(id(one.parent) in keys for one in recovered.found if one.parent != ROOT_PARENT)


def test_the_columns_are_narrow(recovered):
    # Arrays that grow keep some room at their ends, and each has a head.
    assert recovered.tier._core.table.memory_bytes() < 1.15 * 600 * (BLOCK_BYTES + EXTENT_BYTES) + 4096


def test_free_rows_hold_no_keys(recovered):
    table = recovered.tier._core.table
    recovered.tier.drop([one.handle for one in recovered.found[:300]])
    assert (table.blocks, table.extents) == (300, 300)
    assert sum(key != b"" for key in table.block_key) == sum(parent != b"" for parent in table.extent_parent) == 300


def test_a_copy_stays_as_it_was(recovered):
    table = recovered.tier._core.table
    copy, before = table.copy(), list(table.block_key)
    recovered.tier.drop([one.handle for one in recovered.found])
    assert (table.blocks, copy.blocks) == (0, 600)
    assert copy.block_key == before
    assert all(copy.alive(one.handle) for one in recovered.found)
