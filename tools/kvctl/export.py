"""``kvctl export``: a namespace and its blocks as one checked file."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import PAGE_BLOCKS, block_pages, find_namespace, namespace_label
from kvstore.tools.progress import Progress
from kvstore.v1 import admin_pb2

WINDOW_BLOCKS: Final = 512


@slow(60.0)
def export(
    call: Call,
    namespace: Annotated[str, typer.Argument(help="Name, model or start of the id of the namespace.")],
    file: Annotated[str, typer.Argument(help="The file to write, which must not exist.")],
) -> Exit:
    """Write a namespace and all of its blocks into one checked file.

    What cannot be read any more is left out with all that hangs below it. The file holds the namespace's salt.
    Exits with 1 if blocks were left out.
    """
    need(bool(namespace), "NAMESPACE", "empty", "a name, a model or the start of an id")
    from kvstore.core.types import BlockKey, NamespaceId  # noqa: PLC0415 - numpy, which other commands spare
    from kvstore.tools.kvctl.archive import ArchiveWriter  # noqa: PLC0415
    from kvstore.tools.kvctl.moving import WINDOW_BYTES, open_client  # noqa: PLC0415

    info = find_namespace(call, namespace)
    order, orphans = parents_first(_list(call, info.namespace_id))
    left, namespace_id = set(orphans), NamespaceId(info.namespace_id)
    window = max(1, min(WINDOW_BLOCKS, WINDOW_BYTES // max(1, info.layout.stored_bytes)))
    with (
        Progress() as progress,
        ArchiveWriter(Path(file), info) as archive,
        open_client(call, info) as client,
        progress.step(f"exporting {namespace_label(info)}"),
    ):
        for begin in range(0, len(order), window):
            part = order[begin : begin + window]
            got = client.get(namespace_id, [BlockKey(key) for key, _ in part])
            for (key, parent), payload, codec in zip(part, got.payloads, got.codecs, strict=True):
                # None where it is no HIT.
                if payload is None or parent in left:
                    left.add(key)
                else:
                    archive.add(BlockKey(key), BlockKey(parent), codec, payload)
            progress.report(text.plural(archive.blocks, "block"), begin + len(part), len(order))
        archive.finish()
    if call.printer.for_people:
        call.printer.line(f"{text.plural(archive.blocks, 'block')}, {text.size(archive.nbytes)}, in {file}")
        if left:
            call.printer.talk(f"{text.plural(len(left), 'block')} were left out: they, or a parent of theirs, went")
    else:
        call.printer.json({"blocks": archive.blocks, "bytes": archive.nbytes, "left_out": len(left)})
    return Exit.NO if left else Exit.OK


def _list(call: Call, namespace_id: bytes) -> dict[bytes, bytes]:
    """Parents of all blocks of a namespace, by key."""
    request = admin_pb2.ListBlocksRequest(namespace_id=namespace_id, limit=PAGE_BLOCKS)
    pages = block_pages(call, request)
    return {block.key: block.parent for page in pages for block in page.blocks if block.residency}


def parents_first(parents: dict[bytes, bytes]) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Key and parent of each block, parents before children, and the blocks that hang below none of the roots."""
    children: dict[bytes, list[bytes]] = {}
    for key, parent in parents.items():
        children.setdefault(parent, []).append(key)
    order: list[tuple[bytes, bytes]] = []
    waiting = deque([bytes(32)])
    while waiting:
        parent = waiting.popleft()
        for key in children.pop(parent, ()):
            order.append((key, parent))
            waiting.append(key)
    reached = {key for key, _ in order}
    return order, [key for key in parents if key not in reached]
