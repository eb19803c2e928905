"""What a long call to the daemon has done so far, shown on a terminal while it runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.core.errors import KVStoreError
from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.v1 import admin_pb2

LOOK_S: Final = 0.5
STATUS_TIMEOUT_S: Final = 5.0


@contextmanager
def waiting(call: Call, doing: str, counter: str, noun: str) -> Iterator[None]:
    """While the ``with`` lasts, show ``doing`` and by how much a counter of Status has grown. Nothing elsewhere than on
    a terminal. The daemon is asked over a session of its own, since the call's waits."""
    if not (call.printer.for_people and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - which only a terminal needs

    ended = threading.Event()
    with Console(file=sys.stderr).status(doing) as status:
        thread = threading.Thread(target=watch, args=(call, status.update, ended, (doing, counter, noun)), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(STATUS_TIMEOUT_S)


def watch(call: Call, show: Callable[[str], object], ended: threading.Event, what: tuple[str, str, str]) -> None:
    """Show progress until ``ended``. A daemon that does not answer is the call's affair: then only time is shown."""
    doing, counter, noun = what
    began, first = time.monotonic(), -1
    try:
        port = call.connect(call.socket, STATUS_TIMEOUT_S)
    except KVStoreError as error:
        show(f"{doing} ({error.message})")
        return
    try:
        while True:
            answer = port.call("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse, STATUS_TIMEOUT_S)
            now = answer.counters.get(counter, 0)
            first = now if first < 0 else first
            grown = text.size(now - first) if noun == "bytes" else text.plural(now - first, noun)
            show(f"{doing}: {grown}, {text.duration(time.monotonic() - began)}; Ctrl-C ends it here and in the daemon")
            if ended.wait(LOOK_S):
                return
    except KVStoreError as error:
        show(f"{doing} ({error.message})")
    finally:
        port.close()
