"""Options that several commands take, and what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import typer

from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.tokens import TokenSource, parse_keys
from kvstore.v1 import admin_pb2, common_pb2

NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Name, model or start of the id of a namespace; not needed while there is only one."
    ),
]
TokensOption = Annotated[str, typer.Option("--tokens", help="Token ids: 1,2,3 or a JSON list, @FILE, or - for stdin.")]
TextOption = Annotated[str, typer.Option("--text", help="A text, @FILE, or - for stdin; needs --model.")]
ModelOption = Annotated[str, typer.Option("--model", help="Folder of the model, or its tokenizer.json.")]
KeysArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY]...", help="Block keys in hexadecimal, whole or the first digits.")
]
TierOption = Annotated[str, typer.Option("--tier", help="device, host or ssd.", show_default=False)]

TIER_WORDS: Final = {"device": common_pb2.TIER_DEVICE, "host": common_pb2.TIER_HOST, "ssd": common_pb2.TIER_SSD}
COLDER: Final = {number: f"TIER{number}" for number in range(4, 9)}
"""Storage behind SSD, where a daemon has some."""

TIER_NAMES: Final = {number: word.upper() for word, number in TIER_WORDS.items()} | COLDER


def parse_tier(word: str) -> common_pb2.Tier:
    """A tier's word as its number; unspecified for none."""
    if not word:
        return common_pb2.TIER_UNSPECIFIED
    if word.lower() not in TIER_WORDS:
        raise InvalidArgument("--tier", repr(word), "device, host or ssd")
    return TIER_WORDS[word.lower()]


def tier_letters(residency: int) -> str:
    """Residency bits as names, hot to cold: ``DEVICE HOST``; a dash for none."""
    return " ".join(name for number, name in TIER_NAMES.items() if residency >> (number - 1) & 1) or "-"


def all_namespaces(call: Call) -> list[admin_pb2.NamespaceInfo]:
    """Every namespace that the daemon knows, page by page, in order of their names."""
    request = admin_pb2.ListNamespacesRequest()
    found: list[admin_pb2.NamespaceInfo] = []
    while True:
        page = call.ask("Admin/ListNamespaces", request, admin_pb2.ListNamespacesResponse)
        found += page.namespaces
        if not page.next_page_token:
            return sorted(found, key=lambda info: (info.name or info.spec.model, info.namespace_id))
        request = admin_pb2.ListNamespacesRequest(page_token=page.next_page_token)


PAGE_BLOCKS: Final = 1000


def block_pages(call: Call, request: admin_pb2.ListBlocksRequest) -> Iterator[admin_pb2.ListBlocksResponse]:
    """The answers of ListBlocks, page by page; the request's page token is this function's."""
    while True:
        page = call.ask("Admin/ListBlocks", request, admin_pb2.ListBlocksResponse)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def find_namespace(call: Call, wanted: str) -> admin_pb2.NamespaceInfo:
    """The namespace that a user named, or the only one. NotFound and InvalidArgument say which ones there are."""
    known = all_namespaces(call)
    if not known:
        raise NotFound("the daemon knows no namespace yet: nothing was opened or stored", field="--namespace")
    found = [n for n in known if wanted in (n.name, n.spec.model)] or [
        n for n in known if wanted and n.namespace_id.hex().startswith(wanted.lower())
    ]
    if not wanted:
        found = known
    if len(found) == 1:
        return found[0]
    names = ", ".join(namespace_label(n) for n in (found or known)[:8])
    if not found:
        raise NotFound(f"no namespace is called {wanted!r}; there are: {names}", field="--namespace", value=wanted)
    raise InvalidArgument("--namespace", repr(wanted) if wanted else "not given", f"one of: {names}")


def namespace_label(info: admin_pb2.NamespaceInfo) -> str:
    """A namespace in a sentence: its name or model, and the start of its id."""
    return f"{info.name or info.spec.model} ({text.short_key(info.namespace_id)})"


def whole_keys(call: Call, namespace: admin_pb2.NamespaceInfo, given: list[str] | None) -> list[bytes]:
    """Keys as given; a start of a key is completed by asking the daemon, which must know exactly one such block."""
    keys = []
    for prefix in parse_keys(given or []):
        if len(prefix) == 32:
            keys.append(prefix)
            continue
        request = admin_pb2.ShowBlockRequest(namespace_id=namespace.namespace_id, key_prefix=prefix)
        keys.append(call.ask("Admin/ShowBlock", request, admin_pb2.ShowBlockResponse).block.key)
    return keys


def asked_keys(
    call: Call, namespace: admin_pb2.NamespaceInfo, given: list[str] | None, source: TokenSource
) -> tuple[list[bytes], int]:
    """Keys of a question, from keys or from tokens, and how many tokens they stand for."""
    block_tokens = namespace.spec.block_tokens
    if given:
        source.refuse_beside_keys()
        keys = whole_keys(call, namespace, given)
        return keys, len(keys) * block_tokens
    tokens = source.read()
    from kvstore.core.keys import chain_keys  # noqa: PLC0415 - brings numpy, which other commands start without
    from kvstore.core.types import NamespaceId  # noqa: PLC0415

    if len(tokens) < block_tokens:
        raise InvalidArgument("--tokens", f"{len(tokens)} tokens", f"{block_tokens} at least, one whole block")
    return list(chain_keys(NamespaceId(namespace.namespace_id), tokens, block_tokens)), len(tokens)
