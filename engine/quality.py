"""What a codec costs in quality: one model over one text, exact and with every K and V sent through the codec.

Teacher-forced: each token of the text is predicted from the true ones before it. All tokens of all layers are coded,
in blocks as the store keeps them; the model's own computation stays in fp32, so what differs is the codec alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant import dequantise, quantise

BLOCK_TOKENS: Final = 64
LOGIT_ROWS: Final = 512
"""Rows of logits at one time: those of a whole text would take a gigabyte."""
_NAME: Final = "kvstore_quality"

RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""K or V of a layer, [kv_heads, tokens, head_dim] in fp32, as a reader gets them back."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over all tokens of the text. ``kl`` in nats; ``attention_error`` is relative, over all layers' outputs."""

    codec: str
    tokens: int
    kl: float
    same_argmax: float
    perplexity: float
    perplexity_exact: float
    attention_error: float

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.001 is a tenth of a percent worse."""
        return self.perplexity / self.perplexity_exact - 1


@dataclass(slots=True)
class _Tap:
    """What travels with a forward pass: the codec, and squares of errors and of outputs, layer by layer."""

    code: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    errors: list[tuple[float, float]] = field(default_factory=list)


def through_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Raw blocks of a model that computes in ``dtype``."""
    return lambda key, value: (key.to(dtype).float(), value.to(dtype).float())


def through_int8(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and dequantise whole blocks of K and V, [kv_heads, tokens, head_dim] in fp32."""
    heads, tokens, width = key.shape
    geometry = SliceGeometry(heads, width, BLOCK_TOKENS, "float32")
    blocks = tokens // BLOCK_TOKENS
    # [blocks, heads, head_dim, block_tokens] and [blocks, heads, block_tokens, head_dim], as a raw slice holds them.
    keys = key.view(heads, blocks, BLOCK_TOKENS, width).permute(1, 0, 3, 2)
    values = value.view(heads, blocks, BLOCK_TOKENS, width).permute(1, 0, 2, 3)
    raw = torch.stack([keys.reshape(blocks, heads, -1), values.reshape(blocks, heads, -1)], 2).contiguous().numpy()
    coded = np.zeros(blocks * geometry.slice_stride("int8"), np.uint8)
    if not quantise(raw, coded, geometry, blocks, strides=(geometry.raw_bytes, geometry.slice_stride("int8"))):
        raise InvalidArgument("text", "values beyond fp16", "K and V that are finite; such blocks stay raw")
    back = np.empty_like(raw)
    dequantise(coded, back, geometry, blocks, strides=(geometry.raw_bytes, geometry.slice_stride("int8")))
    both = torch.from_numpy(back).view(blocks, heads, 2, -1)
    found_keys = both[:, :, 0].view(blocks, heads, width, BLOCK_TOKENS).permute(1, 0, 3, 2)
    found_values = both[:, :, 1].view(blocks, heads, BLOCK_TOKENS, width).permute(1, 0, 2, 3)
    return found_keys.reshape(heads, tokens, width), found_values.reshape(heads, tokens, width)


CODECS: Final = {
    "fp16": through_dtype(torch.float16),
    "bf16": through_dtype(torch.bfloat16),
    "int8": through_int8,
}


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def _forward(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention call, with K and V sent through the codec on their way."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if arguments.get(name) is not None:
            raise InvalidArgument("model", name, "a model of plain causal attention")
    tap: _Tap = arguments["tap"]
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    out = _attend(query[0], key[0], value[0], scale)
    if tap.code is not None:
        exact = out
        out = _attend(query[0], *tap.code(key[0], value[0]), scale)
        tap.errors.append((float((out - exact).square().sum()), float(exact.square().sum())))
    return out.transpose(0, 1).unsqueeze(0), None


class QualityProbe:
    """One model in fp32, over texts of whole blocks."""

    def __init__(self, network: Any) -> None:
        AttentionInterface.register(_NAME, _forward)
        self._network = network.float().eval()
        self._network.set_attn_implementation(_NAME)

    @classmethod
    def load(cls, folder: Path) -> QualityProbe:
        """The model of a folder."""
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True))

    @torch.inference_mode()
    def measure(self, tokens: Sequence[int], codecs: Sequence[str] = tuple(CODECS)) -> list[Quality]:
        """Compare each codec with the exact run; the text is cut to whole blocks.

        Raises InvalidArgument for a text under two blocks or above the model's positions, or an unknown codec.
        """
        for codec in codecs:
            if codec not in CODECS:
                raise InvalidArgument("codec", repr(codec), f"one of {', '.join(CODECS)}")
        count = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        if not 2 * BLOCK_TOKENS <= count <= self._network.config.max_position_embeddings:
            most = self._network.config.max_position_embeddings
            raise InvalidArgument("text", f"{len(tokens)} tokens", f"{2 * BLOCK_TOKENS} to {most} tokens")
        ids = torch.tensor([list(tokens[:count])])
        exact = self._states(ids, _Tap(None))
        return [self._compare(codec, ids, exact) for codec in codecs]

    def _states(self, ids: torch.Tensor, tap: _Tap) -> torch.Tensor:
        states: torch.Tensor = self._network.get_decoder()(input_ids=ids, use_cache=False, tap=tap)[0][0]
        return states

    def _compare(self, codec: str, ids: torch.Tensor, exact: torch.Tensor) -> Quality:
        tap = _Tap(CODECS[codec])
        states = self._states(ids, tap)
        head = self._network.get_output_embeddings()
        count = len(states) - 1
        kl = same = loss = loss_exact = 0.0
        for begin in range(0, count, LOGIT_ROWS):
            rows = slice(begin, min(begin + LOGIT_ROWS, count))
            following = ids[0, rows.start + 1 : rows.stop + 1]
            wanted = functional.log_softmax(head(exact[rows]).double(), -1)
            found = functional.log_softmax(head(states[rows]).double(), -1)
            kl += float((wanted.exp() * (wanted - found)).sum())
            same += float((wanted.argmax(-1) == found.argmax(-1)).sum())
            loss_exact -= float(wanted.gather(1, following[:, None]).sum())
            loss -= float(found.gather(1, following[:, None]).sum())
        wrong, whole = (sum(column) for column in zip(*tap.errors, strict=True))
        return Quality(
            codec,
            len(states),
            kl / count,
            same / count,
            math.exp(loss / count),
            math.exp(loss_exact / count),
            math.sqrt(wrong / whole),
        )
