"""``kvctl warm``: bring what is kept of a list of prompts to a hotter tier, before engines ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstore.core.errors import InvalidArgument
from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.match import match_all
from kvstore.tools.kvctl.options import ModelOption, NamespaceOption, find_namespace, parse_tier
from kvstore.tools.kvctl.tokens import TokenSource
from kvstore.tools.progress import Progress
from kvstore.v1 import cache_pb2, common_pb2

STEP: Final = 256
"""Blocks that are asked for at one time: progress is told, and Ctrl-C heard, between them."""

WAIT_MS: Final = 5_000


@slow(60.0)
def warm(
    call: Call,
    file: Annotated[str, typer.Argument(help="Prompts, one a line: token ids as a JSON list, or text with --model.")],
    model: ModelOption = "",
    tier: Annotated[str, typer.Option("--tier", help="device or host.")] = "host",
    namespace: NamespaceOption = "",
) -> Exit:
    """Bring what is kept of a list of prompts to a hotter tier.

    A line is a JSON list of token ids, {"tokens": [...]} or {"text": "..."}, or a text; texts need --model.
    Exits with 1 if some blocks of the prompts are not here, or could not be moved.
    """
    need(tier in ("device", "host"), "--tier", repr(tier), "device or host")
    from kvstore.core.keys import chain_keys  # noqa: PLC0415 - brings numpy, which other commands start without
    from kvstore.core.types import NamespaceId  # noqa: PLC0415

    info = find_namespace(call, namespace)
    prompts = asked = here = moved = 0
    with Progress() as progress, progress.step(f"warming {file}"):
        for tokens in read_prompts(file, model):
            keys: list[bytes] = list(chain_keys(NamespaceId(info.namespace_id), tokens, info.spec.block_tokens))
            prompts, asked = prompts + 1, asked + len(keys)
            if not keys:
                continue
            found = match_all(call, info, keys).matched
            here += found
            for begin in range(0, found, STEP):
                moved += _bring(call, info.namespace_id, keys[begin : min(begin + STEP, found)], parse_tier(tier))
                progress.report(f"{text.plural(moved, 'block')} in {tier.upper()}", 0, 0)
    if call.printer.for_people:
        call.printer.line(
            f"{text.plural(prompts, 'prompt')}: {moved:,} of {text.plural(asked, 'block')} are in {tier.upper()} now"
        )
        if here < asked:
            call.printer.talk(f"{text.plural(asked - here, 'block')} were not here: kvctl why says why")
        if moved < here:
            call.printer.talk(f"{text.plural(here - moved, 'block')} found no room in {tier.upper()}")
    else:
        call.printer.json({"prompts": prompts, "blocks": asked, "found": here, "warm": moved})
    return Exit.OK if moved == asked else Exit.NO


def _bring(call: Call, namespace_id: bytes, keys: list[bytes], tier: common_pb2.Tier) -> int:
    request = cache_pb2.PrefetchRequest(namespace_id=namespace_id, keys=b"".join(keys), tier=tier)
    answer = call.ask("Cache/Prefetch", request, cache_pb2.FetchResponse)
    while common_pb2.OUTCOME_PENDING in answer.outcomes:
        wait = cache_pb2.WaitJobRequest(job_id=answer.job_id, timeout_ms=min(WAIT_MS, int(call.timeout * 900)))
        answer = call.ask("Cache/WaitJob", wait, cache_pb2.FetchResponse)
    return sum(outcome == common_pb2.OUTCOME_HIT for outcome in answer.outcomes)


def read_prompts(file: str, model: str) -> Iterator[list[int]]:
    """Token ids of each prompt of a file. InvalidArgument names the line that is none."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgument("FILE", repr(file)[:200], "UTF-8") from error
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found: Any = line
        if line.lstrip()[:1] in "[{":
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument("FILE", f"line {at}", "JSON, or a text") from error
        if isinstance(found, dict):
            found = found.get("tokens", found.get("text"))
        if isinstance(found, list):
            yield TokenSource(tokens=json.dumps(found)).read()
        elif isinstance(found, str):
            # A text that begins as a file or as standard input is a text all the same.
            yield TokenSource(text=f" {found}" if found[:1] in "@-" else found, model=model).read()
        else:
            raise InvalidArgument("FILE", f"line {at}", 'a list of token ids, {"tokens": [...]} or {"text": "..."}')
