"""The watchdog tells once of each stall, and says nothing while the loop turns."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from kvstore.daemon import watchdog as module
from kvstore.daemon.logs import TextLines
from kvstore.daemon.watchdog import Watchdog


@pytest.fixture
def dumped(monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(module.faulthandler, "dump_traceback", lambda **_: told.set())
    return told


def test_a_stalled_loop_is_told(dumped, caplog):
    async def run():
        dog = Watchdog(0.05)
        dog.start(asyncio.get_running_loop())
        # Blocks the loop, as a handler with a bug would, until the watchdog has told.
        assert dumped.wait(20)
        dog.stop()
        return dog.stalls

    assert asyncio.run(run()) == 1
    assert "has not turned" in caplog.text


def test_a_turning_loop_is_left_alone(dumped):
    async def run():
        dog = Watchdog(5.0)
        dog.start(asyncio.get_running_loop())
        for _ in range(100):
            await asyncio.sleep(0)
        dog.stop()
        return dog.stalls

    assert asyncio.run(run()) == 0
    assert not dumped.is_set()


def test_a_record_is_one_line():
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "first\nINFO second", (), None)
    assert "\n" not in TextLines().format(record)
