"""``kvctl unpin``: let go of what ``kvctl pin`` keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import KeysArgument, NamespaceOption, find_namespace, whole_keys
from kvstore.v1 import admin_pb2


def unpin(
    call: Call,
    name: Annotated[str, typer.Argument(help="Name given to kvctl pin.")],
    keys: KeysArgument = None,
    namespace: NamespaceOption = "",
) -> Exit:
    """Let go of what is pinned under a name.

    Everything, or only the blocks that are given. Exits with 5 if nothing is pinned under the name.
    """
    request = admin_pb2.UnpinRequest(name=name)
    if keys:
        info = find_namespace(call, namespace)
        request.namespace_id = info.namespace_id
        request.keys = b"".join(whole_keys(call, info, keys))
    answer = call.ask("Admin/Unpin", request, admin_pb2.UnpinResponse)
    if call.printer.for_people:
        call.printer.line(f"{text.plural(answer.released, 'block')} released")
    else:
        call.printer.answer(answer)
    if not answer.released:
        call.printer.talk(f"nothing is pinned as {name}")
        return Exit.NOT_FOUND
    return Exit.OK
