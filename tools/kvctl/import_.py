"""``kvctl import``: the blocks of a file that ``kvctl export`` wrote."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.progress import Progress


@slow(60.0)
def import_(
    call: Call,
    file: Annotated[str, typer.Argument(help="A file that kvctl export has written.")],
    durable: Annotated[bool, typer.Option("--durable", help="Wait until each block is synced to SSD.")] = False,
) -> Exit:
    """Put the blocks of an exported namespace into this daemon.

    The whole file is checked first: of one that is cut or changed nothing is put. Blocks that are here already stay.
    Exits with 1 if some blocks found no room, or could not be made durable.
    """
    from kvstore.client import PutBlocks  # noqa: PLC0415 - numpy, which other commands spare
    from kvstore.core.namespace import BlockLayout  # noqa: PLC0415
    from kvstore.core.types import Durability, NamespaceId, Outcome  # noqa: PLC0415
    from kvstore.tools.kvctl.archive import ArchiveReader  # noqa: PLC0415
    from kvstore.tools.kvctl.moving import WINDOW_BYTES, open_client, raw_payload  # noqa: PLC0415
    from kvstore.wire import messages  # noqa: PLC0415

    stored = existed = missed = 0
    with Progress() as progress, ArchiveReader(Path(file)) as archive:
        with progress.step(f"checking {file}"):
            archive.verify(lambda done, total: progress.report(text.size(done), done, total))
        info, blocks = archive.info, archive.blocks
        spec, namespace_id = messages.spec_of(info.spec), NamespaceId(info.namespace_id)
        layout = BlockLayout.of(spec)
        window = max(1, WINDOW_BYTES // (layout.layers * layout.raw_slice_bytes))
        with progress.step(f"importing {text.plural(blocks, 'block')}"), open_client(call, info) as client:
            coming = archive.read()
            while part := list(islice(coming, window)):
                done = client.put(
                    namespace_id,
                    PutBlocks(
                        [block.key for block in part],
                        [block.parent for block in part],
                        [raw_payload(spec, layout, block.codec, block.payload) for block in part],
                        durability=Durability.DURABLE if durable else None,
                    ),
                )
                hits = done.outcomes.count(Outcome.HIT)
                existed += sum(done.existed)
                stored, missed = stored + hits, missed + len(part) - hits
                progress.report(text.plural(stored, "block"), stored + missed, blocks)
    if call.printer.for_people:
        call.printer.line(f"{text.plural(stored, 'block')} are here, of which {existed:,} were here already")
        if missed:
            call.printer.talk(f"{text.plural(missed, 'block')} found no room or were not made durable: import again")
    else:
        call.printer.json({"blocks": blocks, "stored": stored, "existed": existed, "missed": missed})
    return Exit.NO if missed else Exit.OK
