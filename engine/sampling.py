"""The next token from logits: greedy, or drawn after temperature, top-k and top-p, in this order.

A request draws from a generator of its own: what it says does not depend on its neighbours in the batch, and a seed
gives the same answer again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvstore.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn and where it ends.

    ``temperature`` 0 is greedy; then top_k, top_p and seed have no effect. ``top_k`` 0 and ``top_p`` 1 are off.
    ``seed`` None draws a seed. The answer ends with ``tokens_max`` tokens, with an end token of the model (unless
    ``ignore_eos``) or a token of ``stop_tokens``, or when its text holds one of ``stop``, which is cut off.
    """

    tokens_max: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.tokens_max < 1:
            raise InvalidArgument("sampling.tokens_max", self.tokens_max, "at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidArgument("sampling.temperature", self.temperature, "0 (greedy) or more")
        if self.top_k < 0:
            raise InvalidArgument("sampling.top_k", self.top_k, "0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument("sampling.top_p", self.top_p, "above 0, at most 1 (off)")
        if any(not text for text in self.stop):
            raise InvalidArgument("sampling.stop", "an empty string", "non-empty strings")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidArgument("sampling.seed", self.seed, "0 to 2**64 - 1")


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
