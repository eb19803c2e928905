"""How many tokens of a model's context a tier holds: from its ``config.json`` and the tier's size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Tier

LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
WIDTH: Final = ("hidden_size", "n_embd", "d_model")
HEAD_DIM: Final = ("head_dim", "kv_channels")
DTYPES: Final = ("float16", "bfloat16", "float32")
PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class TierSize:
    """What one tier holds: its size, the share of it that is used before blocks leave, and the tokens in that."""

    tier: Tier
    capacity_bytes: int
    watermark: float
    block_bytes: int
    tokens: int


def read_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a folder, or that file. InvalidArgument says what is wrong with it."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    expected = "a folder with a config.json, or that file"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no JSON"
        raise InvalidArgument("MODEL", repr(model)[:200], f"{expected} ({reason})") from error
    if not isinstance(found, dict):
        raise InvalidArgument("MODEL", repr(model)[:200], f"{expected} (no JSON object)")
    # Models that see and read keep the part with the text one level down.
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def spec_of(config: Mapping[str, Any], dtype: str = "", codec: str = "raw", block_tokens: int = 64) -> NamespaceSpec:
    """The namespace that a model's K and V would lie in. InvalidArgument names the field that is missing or wrong.

    A model whose layers keep something else than K and V of one shape (latent attention, states) is refused.
    """
    if "kv_lora_rank" in config:
        raise InvalidArgument(
            "kv_lora_rank", config["kv_lora_rank"], "no such field: latent attention keeps no K and V"
        )
    heads = _number(config, HEADS)
    given = next((config[name] for name in KV_HEADS if config.get(name)), None)
    if given is None and config.get("multi_query"):
        given = 1
    width = next((config[name] for name in HEAD_DIM if config.get(name)), None)
    return NamespaceSpec(
        model=str(config.get("_name_or_path") or config.get("model_type") or "model")[:200] or "model",
        dtype=dtype or _dtype(config),
        layers=_number(config, LAYERS),
        kv_heads=_whole("KV heads", heads if given is None else given),
        head_dim=_whole("head_dim", width if width is not None else _number(config, WIDTH) // heads),
        block_tokens=block_tokens,
        codec=codec,
    )


def tier_size(spec: NamespaceSpec, tier: Tier, capacity_bytes: int, watermark: float) -> TierSize:
    """What a tier holds below its high watermark; blocks lie there in whole pages."""
    layout = BlockLayout.of(spec)
    each = layout.device_bytes if tier is Tier.DEVICE else layout.stored_bytes
    each = -(-each // PAGE) * PAGE
    blocks = int(capacity_bytes * watermark) // each
    return TierSize(tier, capacity_bytes, watermark, each, blocks * spec.block_tokens)


def bytes_a_token(spec: NamespaceSpec) -> float:
    """Bytes of one token in HOST and on SSD, padding and headers included."""
    return tier_size(spec, Tier.HOST, 0, 1.0).block_bytes / spec.block_tokens


def _dtype(config: Mapping[str, Any]) -> str:
    given = str(config.get("dtype") or config.get("torch_dtype") or "float16").removeprefix("torch.")
    return given if given in DTYPES else "float16"


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if config.get(name) is not None:
            return _whole(name, config[name])
    raise InvalidArgument(names[0], "missing", "a whole number in config.json")


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(name, repr(value)[:80], "a whole number of 1 or more")
    return value
