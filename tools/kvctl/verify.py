"""``kvctl verify``: read blocks back and compare their checksums, in a running daemon or in a closed directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.core.errors import TierUnavailable
from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import KeysArgument, NamespaceOption, find_namespace, whole_keys
from kvstore.tools.kvctl.waiting import waiting
from kvstore.v1 import admin_pb2


@slow(3600.0)
def verify(
    call: Call,
    keys: KeysArgument = None,
    namespace: NamespaceOption = "",
    rate: Annotated[str, typer.Option("--rate", help="Read at most this much a second, such as 200MiB.")] = "",
    offline: Annotated[str, typer.Option("--offline", help="Check this closed directory of an SSD tier instead.")] = "",
) -> Exit:
    """Read blocks back and compare their checksums.

    All blocks, those of a namespace, or the named ones. A bad block is quarantined and never served.
    Offline, nothing is changed, and no daemon may hold the directory.
    Exits with 1 if damage was found.
    """
    if offline:
        need(not (keys or namespace or rate), "--offline", offline, "no KEY, --namespace or --rate beside it")
        return _offline(call, offline)
    request = admin_pb2.VerifyRequest(bytes_per_second=text.parse_size("--rate", rate) if rate else 0)
    if keys or namespace:
        info = find_namespace(call, namespace)
        request.namespace_id = info.namespace_id
        request.keys = b"".join(whole_keys(call, info, keys))
    with waiting(call, "reading blocks back", "disk_read_bytes", "bytes"):
        answer = call.ask("Admin/Verify", request, admin_pb2.VerifyResponse)
    if call.printer.for_people:
        speed = f", {text.size(answer.bytes / answer.seconds)}/s" if answer.seconds else ""
        call.printer.line(
            f"{text.plural(answer.blocks, 'block')}, {text.size(answer.bytes)}, read in "
            f"{text.duration(answer.seconds)}{speed}; {answer.bad or 'none'} bad"
        )
        for key in answer.bad_keys:
            call.printer.line(f"bad: {text.full_key(key)}")
    else:
        call.printer.answer(answer)
    return Exit.NO if answer.bad else Exit.OK


def _offline(call: Call, directory: str) -> Exit:
    need(Path(directory).is_dir(), "--offline", directory, "a directory")
    # The tier brings numpy and its threads, which no other command needs.
    from kvstore.tiers.ssd import LinuxDisk  # noqa: PLC0415
    from kvstore.tiers.ssd.scrub import check_directory  # noqa: PLC0415
    from kvstore.tools.ssdcheck import render  # noqa: PLC0415

    try:
        report = check_directory(LinuxDisk(directory))
    except TierUnavailable as error:
        call.printer.talk(f"kvctl: {error.message}", style="red")
        return Exit.REFUSED
    if call.printer.for_people:
        for line in render(report).splitlines():
            call.printer.line(line)
    else:
        call.printer.json(asdict(report) | {"whole": report.whole})
    return Exit.OK if report.whole else Exit.NO
