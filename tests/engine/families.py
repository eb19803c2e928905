"""Small random models of the families that the engine runs, each with its reference: the same weights run by
transformers alone, eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from kvstore.core.decoders import Identity
from kvstore.engine.weights import Model, adopt_model

VOCABULARY = 211

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama_rope_scaled": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=50),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=32,
        sliding_window=40,
        layer_types=WINDOWED,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=70, layer_types=WINDOWED, query_pre_attn_scalar=32
    ),
    "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
}


@dataclass(frozen=True)
class Pair:
    """A model for the engine, and the reference with the same weights."""

    model: Model
    reference: Any

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The next ``count`` tokens by transformers alone; end tokens do not end it."""
        with torch.inference_mode():
            answer = self.reference.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return tuple(answer[0, len(prompt) :].tolist())

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a whole sequence by transformers alone."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(tokens)]), use_cache=False).logits[0]


def build_pair(family: str, *, codec: str = "raw", block_tokens: int = 64, **changes: Any) -> Pair:
    """Make the model of a family with fixed random weights; ``changes`` overwrite fields of its configuration."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(7)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        # Norms and biases at their initial 1 and 0 would hide a norm or a bias that is left out.
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    network = copy.deepcopy(reference)
    network.config = copy.deepcopy(reference.config)
    model = adopt_model(network, Identity(family, "seed-7"), "float32", codec=codec, block_tokens=block_tokens)
    return Pair(model, reference)


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
