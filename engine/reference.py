"""What every answer of the engine is compared with: the same model run by transformers alone, with its own cache.

Nothing of the engine is used here but the folder of weights: attention, cache and positions are the library's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

PREFILL_TOKENS: int = 1024
"""Tokens of one forward pass: attention scores of a whole long prompt at once would take gigabytes."""


def common_start(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest start that all sequences share."""
    shared: list[int] = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared


class Reference:
    """One model in ``dtype`` of torch, greedy only."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        # Releases before 5.24 know the argument under its old name only.
        known = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Sequence[int]], tokens_max: int, stop: Sequence[int] = ()) -> list[list[int]]:
        """Greedy tokens of each prompt, ending with ``tokens_max`` or with a token of ``stop``.

        The prompts' common start is computed once and continued from a copy of transformers' own cache.
        """
        shared = common_start([prompt[:-1] for prompt in prompts])
        start = DynamicCache(config=self._model.config)
        self._extend(start, shared)
        return [self._answer(start, prompt, len(shared), (tokens_max, stop)) for prompt in prompts]

    @torch.inference_mode()
    def choices(self, prompt: Sequence[int], following: Sequence[int]) -> list[int]:
        """The most likely token at each place of ``following``, given the prompt and the true tokens before it."""
        cache = DynamicCache(config=self._model.config)
        self._extend(cache, prompt[:-1])
        ids = torch.tensor([[*prompt[-1:], *following[:-1]]])
        chosen: list[int] = self._model(input_ids=ids, **{self._cache_name: cache}).logits[0].argmax(-1).tolist()
        return chosen

    def _answer(
        self, start: DynamicCache, prompt: Sequence[int], done: int, end: tuple[int, Sequence[int]]
    ) -> list[int]:
        cache = copy.deepcopy(start)
        tokens_max, stop = end
        found = [self._extend(cache, prompt[done:])]
        while len(found) < tokens_max and found[-1] not in stop:
            found.append(self._extend(cache, found[-1:]))
        return found

    def _extend(self, cache: DynamicCache, tokens: Sequence[int]) -> int:
        """Feed tokens behind the cache and return the most likely next one; -1 for no tokens."""
        following = -1
        for begin in range(0, len(tokens), PREFILL_TOKENS):
            ids = torch.tensor([list(tokens[begin : begin + PREFILL_TOKENS])])
            out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
            following = int(out.logits[0, -1].argmax())
        return following
