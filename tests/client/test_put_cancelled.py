"""A put that is cancelled while it waits for its commit: its places come back once, by way of the late reply."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvstore.client.flow_put import _Put, _Sent


def test_places_of_a_commit_that_was_waited_for_come_back_once():
    forgotten = []
    link = SimpleNamespace(generation=0, forget=lambda *args: forgotten.append(args))
    flows = SimpleNamespace(options=SimpleNamespace(timeout_s=1.0, buffer_bytes=1 << 20), puts=None)
    put = _Put(flows, b"n" * 32, SimpleNamespace(places_max=lambda _: 4))
    put._sent = _Sent(link, 7, SimpleNamespace(method="Cache/Commit"), ["a place"])
    waiting = put._take_in()
    step = next(waiting)
    with pytest.raises(asyncio.CancelledError):
        waiting.throw(asyncio.CancelledError())
    put.end()
    # Whoever carries out the wait has been given ``late``; a second one would settle the same places again.
    assert step.late is not None
    assert forgotten == []
