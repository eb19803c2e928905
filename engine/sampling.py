"""The next token from logits: greedy, or drawn after temperature, top-k and top-p, in this order.

A request draws from a generator of its own: what it says does not depend on its neighbours in the batch, and a seed
gives the same answer again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvstore.engine.params import SamplingParams

__all__ = ["Draw", "Sampler", "SamplingParams", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a drawn token, and of the most likely ones (token, logprob), likeliest first.

    They are the model's own: before temperature, top-k and top-p.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
        """From logits fp32 [vocabulary]."""
        scores = torch.log_softmax(logits, dim=-1)
        values, tokens = scores.topk(min(count, len(scores)))
        return cls(float(scores[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


class Draw(Protocol):
    """Where the tokens of one request come from."""

    def next_token(self, logits: torch.Tensor) -> int:
        """The token that follows, given logits fp32 [vocabulary]; called once for each token, in their order."""
        ...


class Sampler:
    """Draws the tokens of one request as its parameters say; a ``Draw``."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            # manual_seed takes a signed or an unsigned 64-bit number; both spellings of a seed are the same seed.
            self._generator.manual_seed(params.seed)

    def next_token(self, logits: torch.Tensor) -> int:
        """The next token from logits fp32 [vocabulary]."""
        params = self._params
        if params.temperature == 0.0:
            return int(logits.argmax())
        scores, tokens = (logits / params.temperature).sort(descending=True, stable=True)
        if params.top_k:
            scores, tokens = scores[: params.top_k], tokens[: params.top_k]
        chances = torch.softmax(scores, dim=-1)
        if params.top_p < 1.0:
            # A token stays while the mass before it is below top_p, so the first one always stays.
            kept = int((chances.cumsum(-1) - chances < params.top_p).sum())
            chances, tokens = chances[:kept], tokens[:kept]
        drawn = torch.multinomial(chances, 1, generator=self._generator)
        return int(tokens[drawn])
