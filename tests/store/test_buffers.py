"""Buffers of sessions have a common bound, and what one took is there again when its session has ended."""

from __future__ import annotations

import pytest

from kvstore.core.errors import ResourceExhausted
from kvstore.store.tables import buffers
from kvstore.store.tables.buffers import Buffers

PAGE = 4096


def test_the_sum_is_bounded_and_comes_back():
    make = Buffers(4 * PAGE)
    first, second = make(PAGE), make(3 * PAGE)
    with pytest.raises(ResourceExhausted) as caught:
        make(PAGE)
    assert caught.value.field == "buffer_bytes"
    assert caught.value.expected == "at most 0 now"
    second.close()
    second.close()
    assert make.nbytes == PAGE
    make(3 * PAGE).close()
    first.close()
    assert make.nbytes == 0


def test_a_buffer_that_can_not_be_made_takes_nothing(monkeypatch):
    def fails(*_):
        raise OSError("no memory")

    make = Buffers(4 * PAGE)
    monkeypatch.setattr(buffers, "_Counted", fails)
    with pytest.raises(OSError, match="no memory"):
        make(PAGE)
    assert make.nbytes == 0
