"""What a codec costs in quality: one model over one text, exact and with every K and V sent through the codec.

Teacher-forced: each token of the text is predicted from the true ones before it. All tokens of all layers are coded,
in blocks as the store keeps them; the model's own computation stays in fp32, so what differs is the codec alone.

One forward pass is exact, and one a codec follows. Only the last layer's states are kept of each, so that the logits
of a chunk are computed side by side and the exact ones serve all codecs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.engine.quality_codecs import BLOCK_TOKENS, CODECS, RoundTrip

LOGIT_ROWS: Final = 256
"""Rows of logits at one time: 50 MB of SmolLM2's, in buffers that are filled again and again."""
_NAME: Final = "kvstore_quality"

Step = Callable[[str], Any]
"""Makes a context that lasts as long as the step of that name, to show progress."""


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

    code: RoundTrip | None
    errors: list[tuple[float, float]] = field(default_factory=list)

    @property
    def relative_error(self) -> float:
        wrong, whole = (sum(column) for column in zip(*self.errors, strict=True))
        return math.sqrt(wrong / whole)


@dataclass(slots=True)
class _Sums:
    """Sums over the tokens predicted so far: nats of KL, equal argmaxes, nats of loss."""

    kl: float = 0.0
    same: int = 0
    loss: float = 0.0


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    # With a batch dimension torch takes its flash op, which makes no [tokens, tokens] of anything: ten times as fast.
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
    out = _attend(query, key, value, scale)
    if tap.code is not None:
        exact = out
        keys, values = tap.code(key[0], value[0])
        out = _attend(query, keys[None], values[None], scale)
        tap.errors.append((float((out - exact).square().sum()), float(exact.square().sum())))
    return out.transpose(1, 2), None


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

    @property
    def kv_shape(self) -> tuple[int, int]:
        """KV heads and head size of the model."""
        config = self._network.config
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return getattr(config, "num_key_value_heads", None) or heads, width

    @torch.inference_mode()
    def measure(
        self, tokens: Sequence[int], codecs: Sequence[str] = tuple(CODECS), step: Step = nullcontext
    ) -> list[Quality]:
        """Compare each codec with the exact run; the text is cut to whole blocks. ``step`` is entered around each pass.

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
        taps = [_Tap(CODECS[codec].code) for codec in codecs]
        with step("exact"):
            exact = self._states(ids, _Tap(None))
        coded = []
        for codec, tap in zip(codecs, taps, strict=True):
            with step(codec):
                coded.append(self._states(ids, tap))
        with step("predictions"):
            loss, sums = self._predict(ids[0, 1:], exact[:-1], [states[:-1] for states in coded])
        found = zip(codecs, taps, sums, strict=True)
        return [_quality(codec, count, one, loss, tap.relative_error) for codec, tap, one in found]

    def _states(self, ids: torch.Tensor, tap: _Tap) -> torch.Tensor:
        states: torch.Tensor = self._network.get_decoder()(input_ids=ids, use_cache=False, tap=tap)[0][0]
        return states

    def _predict(
        self, following: torch.Tensor, exact: torch.Tensor, coded: list[torch.Tensor]
    ) -> tuple[float, list[_Sums]]:
        """Loss of the exact states, and what each codec's add up to; row i of all predicts ``following[i]``."""
        head = self._network.get_output_embeddings()
        width = head.weight.shape[0]
        buffers = [torch.empty(LOGIT_ROWS, width) for _ in range(4)]
        loss_exact, sums = 0.0, [_Sums() for _ in coded]
        for rows in _chunks(len(following)):
            logits, chances, other, scratch = (buffer[: rows.stop - rows.start] for buffer in buffers)
            next_ids = following[rows, None]
            _logits(head, exact[rows], logits)
            best = logits.argmax(-1)
            peak = logits.amax(-1, keepdim=True)
            mass = torch.sub(logits, peak, out=chances).exp_().sum(-1, keepdim=True)
            chances /= mass
            whole = peak.double() + mass.double().log()
            loss_exact += float((whole - logits.gather(1, next_ids)).sum())
            for states, found in zip(coded, sums, strict=True):
                _logits(head, states[rows], other)
                found.same += int((other.argmax(-1) == best).sum())
                wanted = other.gather(1, next_ids)
                # With d the exact logit less the coded one: KL = E[d] + log E[exp(-d)] under the exact chances. As
                # 1 + E[exp(-d) - 1] it keeps its digits in fp32, where a difference of two log-softmaxes loses them.
                less = torch.sub(logits, other, out=other)
                mean = torch.mul(less, chances, out=scratch).sum(-1, keepdim=True).double()
                growth = less.neg_().expm1_().mul_(chances).sum(-1, keepdim=True).double().log1p()
                found.kl += float((mean + growth).sum())
                found.loss += float((whole + growth - wanted).sum())
        return loss_exact, sums


def _chunks(count: int) -> Iterator[slice]:
    for begin in range(0, count, LOGIT_ROWS):
        yield slice(begin, min(begin + LOGIT_ROWS, count))


def _logits(head: Any, states: torch.Tensor, into: torch.Tensor) -> None:
    """Fill ``into``: memory of its own for each chunk costs more in page faults than the arithmetic on it."""
    torch.mm(states, head.weight.t(), out=into)
    if getattr(head, "bias", None) is not None:
        into += head.bias


def _quality(codec: str, tokens: int, sums: _Sums, loss_exact: float, error: float) -> Quality:
    count = tokens - 1
    exact, found = math.exp(loss_exact / count), math.exp(sums.loss / count)
    return Quality(codec, tokens, sums.kl / count, sums.same / count, found, exact, error)
