"""``kvctl size``: how many tokens of a model each tier holds."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import TIER_NAMES
from kvstore.tools.output import columns
from kvstore.v1 import admin_pb2

WATERMARK: Final = 0.95
"""The daemon's own, if nobody changes it."""


def size(  # noqa: PLR0913, PLR0917 - an option each
    call: Call,
    model: Annotated[str, typer.Argument(help="Folder of the model, or its config.json.")],
    device: Annotated[str, typer.Option("--device", help="Instead of a running daemon's: size of DEVICE.")] = "",
    host: Annotated[str, typer.Option("--host", help="The same for HOST.")] = "",
    ssd: Annotated[str, typer.Option("--ssd", help="The same for SSD.")] = "",
    codec: Annotated[str, typer.Option("--codec", help="raw or int8.")] = "raw",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float16, bfloat16 or float32; the model's own if not given.")
    ] = "",
    watermark: Annotated[
        float, typer.Option("--watermark", help="Share of a tier in use above which it is reclaimed.", min=0.01, max=1)
    ] = WATERMARK,
) -> Exit:
    """How many tokens of a model each tier holds.

    From the model's config.json and the sizes of the running daemon, or those that are given. Watermarks, headers and
    padding are counted; what other models take is not.
    """
    # Layouts bring numpy, which other commands start without.
    from kvstore.core.sizing import bytes_a_token, read_config, spec_of, tier_size  # noqa: PLC0415
    from kvstore.core.types import Tier  # noqa: PLC0415

    need(codec in ("raw", "int8"), "--codec", repr(codec), "raw or int8")
    need(dtype in ("", "float16", "bfloat16", "float32"), "--dtype", repr(dtype), "float16, bfloat16 or float32")
    spec = spec_of(read_config(model), dtype, codec)
    given = {"device": device, "host": host, "ssd": ssd}
    if any(given.values()):
        sizes = [
            (Tier[word.upper()], text.parse_size(f"--{word}", value), watermark)
            for word, value in given.items()
            if value
        ]
    else:
        answer = call.ask("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)
        sizes = [(Tier(tier.tier), tier.capacity_bytes, tier.high_watermark) for tier in answer.tiers]
    tiers = [tier_size(spec, tier, nbytes, share) for tier, nbytes, share in sizes]
    each = bytes_a_token(spec)
    if not call.printer.for_people:
        call.printer.json(
            {
                "layers": spec.layers, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "dtype": spec.dtype,
                "codec": spec.codec, "block_tokens": spec.block_tokens, "bytes_per_token": each,
                "tiers": [
                    {"tier": t.tier.name.lower(), "capacity_bytes": t.capacity_bytes, "watermark": t.watermark,
                     "block_bytes": t.block_bytes, "tokens": t.tokens}
                    for t in tiers
                ],
            }
        )  # fmt: skip
        return Exit.OK
    call.printer.line(
        f"{spec.layers} layers x {spec.kv_heads} KV heads x {spec.head_dim}, {spec.dtype}, {spec.codec}: "
        f"{text.size(each)} a token, {text.count(int((1 << 30) / each))} tokens a GiB"
    )
    call.printer.line()
    call.printer.table(
        columns("Tier|>Size|?>Used up to|?>Block|>Tokens"),
        [
            (
                TIER_NAMES.get(int(t.tier), t.tier.name), text.size(t.capacity_bytes), f"{t.watermark:.0%}",
                text.size(t.block_bytes), text.count(t.tokens),
            )
            for t in tiers
        ],
    )  # fmt: skip
    return Exit.OK
