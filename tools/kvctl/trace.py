"""``kvctl trace``: record what engines ask for, or replay such a record through tiers of other sizes."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, TextIO

import typer

from kvstore.core.errors import InvalidArgument
from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.output import columns
from kvstore.tools.progress import Progress
from kvstore.v1 import inspect_pb2

LOOK_S: Final = 1.0


@slow(60.0)
def trace(  # noqa: PLR0913, PLR0917 - an option each
    call: Call,
    what: Annotated[str, typer.Argument(metavar="record|replay", help="Which of the two.")],
    file: Annotated[str, typer.Argument(help="The trace: JSON lines, a request a line.")],
    seconds: Annotated[float, typer.Option("--seconds", help="record: so long; 0 until Ctrl-C.", min=0)] = 0,
    device: Annotated[int, typer.Option("--device", help="replay: blocks that DEVICE holds.", min=0)] = 0,
    host: Annotated[int, typer.Option("--host", help="replay: blocks that HOST holds.", min=0)] = 0,
    ssd: Annotated[int, typer.Option("--ssd", help="replay: blocks that SSD holds.", min=0)] = 0,
    policy: Annotated[str, typer.Option("--policy", help="replay: one policy, not all that there are.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-l", help="replay: so many requests; 0 for all.", min=0)] = 0,
) -> Exit:
    """Record what engines ask for, or replay it through other tiers.

    A record has numbers for prefixes, no keys and no tokens. Replay says how many blocks would be found, by tier and
    eviction policy, in tiers of so many blocks; no daemon is needed.
    """
    need(what in ("record", "replay"), "record|replay", repr(what), "record or replay")
    if what == "record":
        return _record(call, file, seconds)
    return _replay(call, file, {"device": device, "host": host, "ssd": ssd}, policy, limit)


def _record(call: Call, file: str, seconds: float) -> Exit:
    answer = call.ask("Admin/Trace", inspect_pb2.TraceRequest(), inspect_pb2.TraceResponse)
    began, written, lost = time.monotonic(), 0, 0
    numbers: dict[tuple[bytes, int], int] = {}
    with Path(file).open("w", encoding="utf-8") as out, Progress() as progress, progress.step(f"recording to {file}"):
        first = 0.0
        while not seconds or time.monotonic() - began < seconds:
            try:
                time.sleep(min(LOOK_S, seconds or LOOK_S))
            except KeyboardInterrupt:
                break
            request = inspect_pb2.TraceRequest(after_sequence=answer.sequence)
            answer = call.ask("Admin/Trace", request, inspect_pb2.TraceResponse)
            lost += answer.lost
            for entry in answer.entries:
                first = first or entry.unix_seconds
                _write(out, entry, numbers, first)
                written += 1
            out.flush()
            progress.report(text.plural(written, "request"), 0, 0)
    if call.printer.for_people:
        call.printer.line(f"{text.plural(written, 'request')} in {file}")
        if lost:
            call.printer.talk(f"{text.plural(lost, 'request')} came faster than they were read, and are missing")
    else:
        call.printer.json({"requests": written, "lost": lost, "file": file})
    return Exit.NO if lost else Exit.OK


def _write(out: TextIO, entry: inspect_pb2.TraceEntry, numbers: dict[tuple[bytes, int], int], first: float) -> None:
    ids = [numbers.setdefault((entry.namespace_id, one), len(numbers)) for one in entry.prefix_ids]
    line = {
        "timestamp": round(1000 * (entry.unix_seconds - first)), "input_length": len(ids) * entry.block_tokens,
        "output_length": 0, "hash_ids": ids, "matched": entry.matched,
    }  # fmt: skip
    out.write(json.dumps(line) + "\n")


def _replay(call: Call, file: str, sizes: dict[str, int], policy: str, limit: int) -> Exit:
    # The policies bring the columns of the store, which other commands start without.
    from kvstore.core.types import Tier  # noqa: PLC0415
    from kvstore.store.eviction.contract import policies  # noqa: PLC0415
    from kvstore.tools.kvctl.replay import RATIO_DIGITS, Replay, read_trace  # noqa: PLC0415

    known = policies()
    if policy and policy not in known:
        raise InvalidArgument("--policy", repr(policy), " or ".join(known))
    need(any(sizes.values()), "--device, --host and --ssd", "none", "the blocks that a tier holds")
    tiers = {Tier[word.upper()]: blocks for word, blocks in sizes.items() if blocks}
    rows, told = [], []
    with Progress() as progress:
        for name in [policy] if policy else list(known):
            replay = Replay(tiers, name)
            with progress.step(f"replaying with {name}"):
                for ids in islice(read_trace(file), limit or None):
                    replay.request(ids)
                    if replay.result.requests % 256 == 0:
                        progress.report(text.plural(replay.result.requests, "request"), 0, 0)
            found = replay.result
            share = {tier: found.found[tier] / found.blocks if found.blocks else 0.0 for tier in tiers}
            best = 1 - found.first / found.blocks if found.blocks else 0.0
            rows.append((name, *(f"{share[tier]:.1%}" for tier in tiers), f"{sum(share.values()):.1%}", f"{best:.1%}"))
            told.append(
                {
                    "policy": name, "requests": found.requests, "blocks": found.blocks,
                    "hit_ratio": round(sum(share.values()), RATIO_DIGITS),
                    "by_tier": {tier.name.lower(): round(share[tier], RATIO_DIGITS) for tier in tiers},
                    "best_possible": round(best, RATIO_DIGITS),
                }
            )  # fmt: skip
    if call.printer.for_people:
        call.printer.line(f"{text.plural(found.requests, 'request')}, {text.plural(found.blocks, 'block')}")
        call.printer.line()
        titles = "|".join(f">{tier.name}" for tier in tiers)
        call.printer.table(columns(f"Policy|{titles}|>Found|>Any size"), rows)
    else:
        call.printer.json({"replays": told})
    return Exit.OK
