"""The model runner: one forward pass of the library's module over a step's tokens."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.engine.attention import attending
from kvstore.engine.memory import CPU
from kvstore.engine.step import StepInput


class ModelRunner:
    """Runs the module of a Model on ``device``, where it is moved.

    The module's own cache is not used: K and V live in the blocks.
    """

    def __init__(self, network: Any, device: torch.device = CPU) -> None:
        self._network = network.to(device)
        self._device = device

    @torch.inference_mode()
    def run(self, step: StepInput) -> torch.Tensor:
        """Compute the step's tokens, writing their K and V into their blocks, which are written when this returns.

        Returns logits fp32 [rows, vocabulary] of the wanted rows, on the CPU. With no rows wanted the output layer is
        skipped and the result is empty.
        """
        network = self._network if len(step.rows) else self._network.base_model
        wanted = {"logits_to_keep": step.rows} if len(step.rows) else {}
        with attending(step.attention):
            answer = network(input_ids=step.token_ids, position_ids=step.positions, use_cache=False, **wanted)
        if self._device.type == "cuda":
            # What is committed next is read by other processes, which know nothing of this stream.
            torch.cuda.current_stream(self._device).synchronize()
        if not wanted:
            return torch.empty(0, 0)
        logits: torch.Tensor = answer.logits[0]
        return logits.float().cpu()
