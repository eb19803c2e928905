"""Long calls show what they have done so far, on a terminal only."""

from __future__ import annotations

import threading

from kvstore.core.errors import Unavailable
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.waiting import waiting, watch
from kvstore.tools.output import Format, Printer
from kvstore.v1 import admin_pb2

WHAT = ("reading", "disk_read_bytes", "bytes")


def counting(daemon, ended, values):
    """Status answers these values of the counter, and the call ends with the last."""
    left = iter(values)

    def status(_request):
        value = next(left)
        if value == values[-1]:
            ended.set()
        return admin_pb2.StatusResponse(counters={"disk_read_bytes": value})

    daemon.replies["Admin/Status"] = status


def test_growth_is_shown_until_the_call_has_ended(daemon, monkeypatch):
    monkeypatch.setattr("kvstore.tools.kvctl.waiting.LOOK_S", 0)
    ended, shown = threading.Event(), []
    counting(daemon, ended, [5, 5 + 1024, 5 + 2048])
    watch(Call(Printer(Format.TABLE), "s", 1.0, daemon.connect), shown.append, ended, WHAT)
    assert [line.partition(",")[0] for line in shown] == ["reading: 0 B", "reading: 1 KiB", "reading: 2 KiB"]
    assert daemon.closed == 1


def test_a_daemon_that_does_not_answer_breaks_nothing(daemon):
    daemon.replies["Admin/Status"] = Unavailable("gone")
    shown = []
    watch(Call(Printer(Format.TABLE), "s", 1.0, daemon.connect), shown.append, threading.Event(), WHAT)
    assert shown == ["reading (gone)"]


def test_nothing_is_asked_where_nobody_watches(daemon):
    with waiting(Call(Printer(Format.TABLE), "s", 1.0, daemon.connect), *WHAT):
        pass
    assert daemon.sockets == []
