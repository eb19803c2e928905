"""``kvctl match``: how much of a prompt is here, and on which tiers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TextOption,
    TokensOption,
    asked_keys,
    find_namespace,
    tier_letters,
)
from kvstore.tools.kvctl.tokens import TokenSource
from kvstore.tools.output import columns, enum_word, plain
from kvstore.v1 import admin_pb2, cache_pb2, common_pb2


def match(
    call: Call,
    keys: KeysArgument = None,
    tokens: TokensOption = "",
    text_: TextOption = "",
    model: ModelOption = "",
    namespace: NamespaceOption = "",
) -> Exit:
    """How much of a prompt is here, and on which tiers.

    Counts resident blocks from the start of the prompt on; moves nothing, keeps nothing from being dropped.
    Exits with 1 unless every block matched.
    """
    info = find_namespace(call, namespace)
    wanted, token_count = asked_keys(call, info, keys, TokenSource(tokens, text_, model))
    answer = match_all(call, info, wanted)
    printer = call.printer
    if printer.for_people:
        matched_tokens = answer.matched * info.spec.block_tokens
        printer.line(
            f"{answer.matched} of {text.plural(len(wanted), 'block')} matched: "
            f"{text.count(matched_tokens)} of {text.plural(token_count, 'token')}"
        )
        printer.line()
        printer.table(columns(">Blocks|>Count|Tiers"), runs(answer.residency))
        if answer.matched < len(wanted):
            printer.line()
            word = enum_word(common_pb2.Reason.DESCRIPTOR, answer.reason).replace("_", " ")
            printer.line(f"block {answer.matched} ({text.short_key(wanted[answer.matched])}) is a miss: {word}")
            printer.talk("kvctl why, with the same options, says more", style="dim")
    else:
        printer.json({"blocks": len(wanted), "tokens": token_count, **plain(answer)})
    return Exit.OK if answer.matched == len(wanted) else Exit.NO


def match_all(call: Call, info: admin_pb2.NamespaceInfo, keys: list[bytes]) -> cache_pb2.MatchResponse:
    """Match in batches that the daemon takes, as one answer."""
    from kvstore.core.types import BATCH_KEYS_MAX  # noqa: PLC0415 - as the keys themselves, see options

    # Opening gives this session the right to ask. It is known, so nothing is made and its policy stays.
    call.ask("Cache/OpenNamespace", cache_pb2.OpenNamespaceRequest(spec=info.spec), cache_pb2.OpenNamespaceResponse)
    whole = cache_pb2.MatchResponse()
    for begin in range(0, len(keys), BATCH_KEYS_MAX):
        batch = keys[begin : begin + BATCH_KEYS_MAX]
        request = cache_pb2.MatchRequest(namespace_id=info.namespace_id, keys=b"".join(batch))
        part = call.ask("Cache/Match", request, cache_pb2.MatchResponse)
        whole.residency.extend(part.residency)
        whole.matched += part.matched
        if part.matched < len(batch):
            whole.reason = part.reason
            whole.near.extend(part.near)
            break
    return whole


def runs(residency: Iterable[int]) -> list[tuple[str, str, str]]:
    """Residency of consecutive blocks as runs: first to last block, how many, tiers."""
    rows = []
    begin = 0
    for bits, group in groupby(residency):
        length = len(list(group))
        last = begin + length - 1
        rows.append((f"{begin}" if length == 1 else f"{begin}-{last}", str(length), tier_letters(bits)))
        begin += length
    return rows
