"""``kvctl forget``: remove all blocks of a namespace, from every tier."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import find_namespace, namespace_label
from kvstore.tools.progress import Progress
from kvstore.v1 import inspect_pb2

STEP: Final = 16_384


@slow(60.0)
def forget(
    call: Call,
    namespace: Annotated[str, typer.Argument(help="Name, model or start of the id of the namespace.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")] = False,
) -> Exit:
    """Remove all blocks of a namespace, from every tier.

    Blocks that are leased or pinned stay. It goes in steps; Ctrl-C keeps what is left.
    Exits with 4 if some blocks stay.
    """
    need(bool(namespace), "NAMESPACE", "empty", "a name, a model or the start of an id")
    info = find_namespace(call, namespace)
    question = f"Remove {text.plural(info.blocks, 'block')} of {namespace_label(info)} from every tier?"
    if not yes and not typer.confirm(question, err=True):
        return Exit.NO
    removed, answer = 0, inspect_pb2.ForgetResponse(left=info.blocks)
    with Progress() as progress, progress.step(f"forgetting {namespace_label(info)}"):
        while answer.left:
            request = inspect_pb2.ForgetRequest(namespace_id=info.namespace_id, limit=STEP)
            answer = call.ask("Admin/Forget", request, inspect_pb2.ForgetResponse)
            removed += answer.removed
            progress.report(text.plural(removed, "block"), removed, removed + answer.left)
            if not answer.removed:
                break
    if call.printer.for_people:
        call.printer.line(f"{text.plural(removed, 'block')} removed")
        if answer.left:
            call.printer.talk(f"{text.plural(answer.left, 'block')} stay: leased or pinned, see kvctl leases")
    else:
        call.printer.json({"removed": removed, "left": answer.left})
    return Exit.REFUSED if answer.left else Exit.OK
