"""What the tables take: columns that are narrow."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.types import ROOT_PARENT

BLOCK_BYTES = 38
EXTENT_BYTES = 68


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


def test_blocks_and_extents_have_their_keys_and_parents(recovered):
    table = recovered.tier._core.table
    keys = [recovered.maker.key(seed) for seed in range(600)]
    assert set(table.block_key) == {one.key for one in recovered.found} == set(keys)
    assert table.block_key.some(np.array([3, 1])) == [table.block_key[3], table.block_key[1]]
    assert sorted(table.extent_parent) == sorted(ROOT_PARENT if n % 12 == 0 else keys[n - 1] for n in range(600))
    with pytest.raises(IndexError):
        table.block_key[600]


def test_the_columns_are_narrow(recovered):
    # Arrays that grow keep some room at their ends, and each has a head.
    assert recovered.tier._core.table.memory_bytes() < 1.15 * 600 * (BLOCK_BYTES + EXTENT_BYTES) + 4096


def test_free_rows_hold_no_keys(recovered):
    table = recovered.tier._core.table
    recovered.tier.drop([one.handle for one in recovered.found[:300]])
    assert (table.blocks, table.extents) == (300, 300)
    assert sum(key != ROOT_PARENT for key in table.block_key) == 300
    assert sum(parent != ROOT_PARENT for parent in table.extent_parent) == 275


def test_a_copy_stays_as_it_was(recovered):
    table = recovered.tier._core.table
    copy, before = table.copy(), list(table.block_key)
    recovered.tier.drop([one.handle for one in recovered.found])
    assert (table.blocks, copy.blocks) == (0, 600)
    assert list(copy.block_key) == before
    assert all(copy.alive(one.handle) for one in recovered.found)
