"""Numbers for people."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.tools import text


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (200 << 20, "200 MiB"),
        (int(123.4 * (1 << 30)), "123 GiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_size(nbytes, shown):
    assert text.size(nbytes) == shown


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("64mib", 64 << 20),
        ("2 KB", 2000),
        ("10B", 10),
        ("3TiB", 3 << 40),
    ],
)
def test_parse_size(given, nbytes):
    assert text.parse_size("--bytes", given) == nbytes


@pytest.mark.parametrize("given", ["", "MiB", "-1", "1,5GiB", "5 stones", "1e9"])
def test_parse_size_names_the_option(given):
    with pytest.raises(InvalidArgument) as caught:
        text.parse_size("--bytes", given)
    assert caught.value.field == "--bytes"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.5, "0.5 s"),
        (42.4, "42 s"),
        (61, "1 min 1 s"),
        (7384, "2 h 3 min"),
        (3 * 86400 + 7200, "3 d 2 h"),
    ],
)
def test_duration(seconds, shown):
    assert text.duration(seconds) == shown


def test_keys_and_plurals():
    assert text.short_key(bytes(range(32))) == "000102030405"
    assert text.short_key(bytes(32)) == "-"
    assert (text.plural(1, "block"), text.plural(1200, "block")) == ("1 block", "1,200 blocks")
