"""What one caller may cost all others, counted and not timed."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.rpc.convert import keys_of
from kvstore.tools.chaos.ground import chain

KEYS = 4096


class Counted(bytes):
    """Bytes whose slices count how often one is compared with another."""

    compared = 0

    def __getitem__(self, at):
        return Counted(bytes.__getitem__(self, at))

    def __eq__(self, other):
        Counted.compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def test_a_double_key_among_many_is_found_in_a_number_of_steps_that_grows_with_them():
    keys = chain("double", KEYS - 1)
    Counted.compared = 0
    with pytest.raises(InvalidArgument, match="twice"):
        keys_of(Counted(b"".join([*keys, keys[-1]])))
    assert Counted.compared <= 4 * KEYS
