"""The benches run and give figures of the right kind; what the figures are is not for a test to say."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.store.bench import index_figures, match_seconds
from kvstore.store.config import StoreConfig, Watermarks


def test_index_figures():
    figures = index_figures(5000)
    assert figures.blocks == 5000
    assert figures.load_seconds > 0


def test_match_seconds_are_sorted():
    times = match_seconds(keys=64, repeats=20, busy_threads=1)
    assert len(times) == 20
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"loader_threads": 65},
        {"loader_threads": -1},
        {"loader_threads": 0, "writer_threads": 1},
        {"sessions_max": 0},
        {"leases_max": 70_000},
        {"extent_blocks_max": 65},
        {"tick_ms": 0},
    ],
)
def test_settings_are_checked(change):
    with pytest.raises(InvalidArgument):
        StoreConfig(**change)


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, 0.0), (0.0, 0.0)])
def test_watermarks_are_fractions_in_order(high, low):
    with pytest.raises(InvalidArgument, match="watermarks"):
        Watermarks(high=high, low=low)
