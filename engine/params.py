"""How an answer is drawn and where it ends; apart from the drawing, so that commands read options without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import InvalidArgument

LOGPROBS_MAX: Final = 20
"""Most alternatives that are told for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Attention that reads, of the blocks in storage, those that hold most of the mass (``selection.py``).

    ``mass`` is the share of the estimated mass to be read, ``max_share`` bounds the blocks that are read from storage,
    as a share of those of the context.
    """

    mass: float = 0.98
    max_share: float = 0.1

    def __post_init__(self) -> None:
        for name in ("mass", "max_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidArgument(f"attention.{name}", getattr(self, name), "above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn and where it ends.

    ``temperature`` 0 is greedy; then top_k, top_p and seed have no effect. ``top_k`` 0 and ``top_p`` 1 are off.
    ``seed`` None draws a seed. The answer ends with ``tokens_max`` tokens, with an end token of the model (unless
    ``ignore_eos``) or a token of ``stop_tokens``, or when its text holds one of ``stop``, which is cut off.
    ``attention`` None is exact; ``Selected`` applies to steps of one token, a prompt is computed exactly.
    ``logprobs`` asks for the log-probability of each token and of that many most likely ones (0: of the token alone).
    """

    tokens_max: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    attention: Selected | None = None

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
        if self.logprobs is not None and not 0 <= self.logprobs <= LOGPROBS_MAX:
            raise InvalidArgument("sampling.logprobs", self.logprobs, f"0 to {LOGPROBS_MAX}")
