"""A size means the same wherever it is read."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.sizes import parse_size
from kvstore.daemon.config import Config
from kvstore.tools import text

SIZES = {
    "0": 0, "4096": 4096, "64 MiB": 64 << 20, "64mib": 64 << 20, "1.5 GiB": 3 << 29, "2GB": 2 * 10**9,
    "7 kb": 7000, "1 PiB": 1 << 50,
}  # fmt: skip


@pytest.mark.parametrize("given", SIZES)
def test_the_daemon_and_its_tools_agree(given: str) -> None:
    assert text.parse_size("--bytes", given) == parse_size(given) == SIZES[given]
    assert Config(ssd_free_floor=given).ssd_free_floor == SIZES[given]


@pytest.mark.parametrize("given", ["", "x", "-1", "1e3", "5 parsecs", "8bit", "1,5GiB", "64M", "8 Mbit", "64 MiB/s"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="64 MiB"):
        parse_size(given)
    with pytest.raises(InvalidArgument, match="--bytes"):
        text.parse_size("--bytes", given)


@pytest.mark.parametrize("given", [True, None, 2.5, b"64"])
def test_values_of_other_types_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="64 MiB"):
        parse_size(given)
