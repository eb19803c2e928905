"""Small random models that transformers runs, the same in each process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GemmaConfig, LlamaConfig, Qwen2Config

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=12),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=40, layer_types=WINDOWED),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=70, layer_types=WINDOWED),
}


def build(family: str, seed: int = 3) -> Any:
    """A model with random weights, ready to generate."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


def prompt(seed: int, tokens: int) -> torch.Tensor:
    """One row of random tokens, none of them special."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (1, tokens), generator=chance)
