"""``kvctl leases``: who keeps what from being dropped, and for how long."""

from __future__ import annotations

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.output import columns
from kvstore.v1 import admin_pb2


def leases(call: Call) -> Exit:
    """Who keeps what from being dropped, and the sessions.

    Pins of kvctl are listed with the owner operator; they have no lease and no end.
    """
    answer = _all_pages(call)
    printer = call.printer
    if not printer.for_people:
        printer.answer(answer)
        return Exit.OK
    printer.table(
        columns(">Lease|~Name|~Owner|>Pid|>Left|>Pins|>Holds|?>Buffer"),
        [
            (
                str(lease.lease_id) if lease.lease_id else "-",
                lease.name or "-",
                lease.owner or "-",
                str(lease.pid) if lease.pid else "-",
                text.duration(lease.seconds_left) if lease.seconds_left else "no end",
                text.count(lease.pins),
                text.count(lease.holds),
                text.size(lease.buffer_bytes) if lease.buffer_bytes else "-",
            )
            for lease in answer.leases
        ],
    )
    if answer.leases and answer.sessions:
        printer.line()
    printer.table(
        columns("~Session|Kind|>Pid|>Uid|>Buffer|>In use|>Reservations"),
        [
            (
                session.owner or "-",
                "remote" if session.remote else "local",
                str(session.pid) if session.pid else "-",
                "-" if session.remote else str(session.uid),
                text.size(session.buffer_bytes) if session.buffer_bytes else "-",
                text.size(session.buffer_used_bytes) if session.buffer_bytes else "-",
                text.count(session.reservations),
            )
            for session in answer.sessions
        ],
    )
    if not answer.leases:
        printer.talk("no leases")
    return Exit.OK


def _all_pages(call: Call) -> admin_pb2.ListLeasesResponse:
    answer = call.ask("Admin/ListLeases", admin_pb2.ListLeasesRequest(), admin_pb2.ListLeasesResponse)
    while answer.next_page_token:
        request = admin_pb2.ListLeasesRequest(page_token=answer.next_page_token)
        answer.next_page_token = ""
        # Lists grow, and the token is the new page's.
        answer.MergeFrom(call.ask("Admin/ListLeases", request, admin_pb2.ListLeasesResponse))
    return answer
