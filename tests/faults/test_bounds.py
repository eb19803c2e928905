"""What one caller may cost all others, counted and not timed."""

from __future__ import annotations

import sys

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.rpc.convert import keys_of
from kvstore.tools.chaos.ground import chain

KEYS = 4096


class Counted(bytes):
    """Keys that count how often one is compared with another."""

    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def test_a_double_key_among_many_is_found_in_a_number_of_steps_that_grows_with_them(monkeypatch):
    keys = chain("double", KEYS - 1)
    counted = [Counted(key) for key in (*keys, keys[-1])]
    monkeypatch.setattr(sys.modules[keys_of.__module__], "split_keys", lambda *_: counted)
    Counted.compared = 0
    with pytest.raises(InvalidArgument, match="twice"):
        keys_of(b"".join(counted))
    assert Counted.compared <= 4 * KEYS
