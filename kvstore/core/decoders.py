"""The namespace of a decoder: everything in its configuration that changes the bytes of its K and V.

The rotary settings stand in their own field so that a mismatch can name them. The rest of the configuration goes into
``extra`` as one digest: a setting this code does not know still tells two models apart, at the price of misses when
a new release of transformers adds a field. A configuration is any object with the fields of a Hugging Face one:
nothing here imports transformers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec, canonical_json


class UnsupportedModel(InvalidArgument):
    """The model can not be served: its files are not whole, or its family does not fit."""


LAYER_KINDS: Final = ("full_attention", "sliding_attention")

_VOLATILE: Final = frozenset(
    {
        "_name_or_path", "_attn_implementation", "architectures", "attn_implementation", "bos_token_id",
        "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "label2id", "output_attentions",
        "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "rope_parameters", "rope_theta",
        "rope_scaling", "torch_dtype", "transformers_version", "use_cache", "max_position_embeddings",
        "tie_word_embeddings", "initializer_range",
    }
)  # fmt: skip
"""Fields that change no K or V, or that have a field of the spec to themselves."""

_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")


def check_supported(config: Any) -> None:
    """Raise UnsupportedModel, naming the field, for a model whose K and V are not a function of its prefix alone.

    Refused: attention other than full and sliding-window, layers that share K and V, bidirectional attention, and
    rotary settings whose frequencies depend on the length of the whole sequence (a prefix would have other bytes in
    a longer prompt).
    """
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_KINDS:
            raise UnsupportedModel("config.layer_types", repr(kind), f"one of {', '.join(LAYER_KINDS)}")
    for field in ("num_kv_shared_layers", "use_bidirectional_attention", "attention_chunk_size", "kv_lora_rank"):
        if getattr(config, field, None):
            raise UnsupportedModel(f"config.{field}", getattr(config, field), "absent; such models cannot be run")
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT:
            raise UnsupportedModel(
                "config.rope_parameters.rope_type", repr(rope["rope_type"]), "a type whose frequencies are fixed"
            )


@dataclass(frozen=True, slots=True)
class Identity:
    """Which weights: a name that users know, and a digest that pins the bytes."""

    name: str
    revision: str


def spec_of(
    config: Any, identity: Identity, dtype: str, *, block_tokens: int = 64, codec: str = "raw", salt: bytes = b""
) -> NamespaceSpec:
    """The spec of a decoder with this Hugging Face configuration, its K and V kept in ``dtype`` ("float32")."""
    check_supported(config)
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None)
    return NamespaceSpec(
        model=identity.name,
        revision=identity.revision,
        dtype=dtype,
        layers=config.num_hidden_layers,
        kv_heads=_kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        block_tokens=block_tokens,
        rope=canonical_json(rope) if rope else "",
        codec=codec,
        salt=salt,
        extra=canonical_json({"config_sha256": config_digest(config)}),
    )


def _kv_heads(config: Any) -> int:
    """Heads that K and V have. Families from before grouped heads say with a flag that there is one."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def config_digest(config: Any) -> str:
    """SHA-256, in hex, over the settings that change bytes and have no field of their own in the spec."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    return hashlib.sha256(canonical_json(settings).encode()).hexdigest()


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return [*nested, rope]
