"""Teacher forcing: a request is fed given tokens, and what the model would have chosen is kept beside them.

Two ways to keep K and V can be compared token by token so: after a first other choice both still see the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """The most likely token, and by how much: ``margin`` is its logit less that of the second."""

    token: int
    margin: float


class Watched:
    """A ``Draw`` that feeds ``tokens``, or its own choices where there are none, and keeps its choices in order."""

    def __init__(self, tokens: Sequence[int] | None = None) -> None:
        self._tokens = tokens
        self.choices: list[Choice] = []

    def next_token(self, logits: torch.Tensor) -> int:
        """See ``Draw``. IndexError past the last of the given tokens."""
        (first, second), (token, _) = (part.tolist() for part in logits.topk(2))
        self.choices.append(Choice(token, first - second))
        return token if self._tokens is None else self._tokens[len(self.choices) - 1]
