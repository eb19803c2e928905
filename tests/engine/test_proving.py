"""A model that the engine would compute wrongly is refused when it is loaded, before anything is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from kvstore.core.decoders import Identity, UnsupportedModel
from kvstore.engine.weights import Model, adopt_model
from tests.engine.families import FAMILIES, SIZES, build_pair


class Twice(LlamaAttention):
    """Attends once more, to what it attended to before: the library alone runs it."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        first, _ = super().forward(hidden_states, **arguments)
        return super().forward(hidden_states + first, **arguments)


class Never(LlamaAttention):
    """Lets the tokens through as they are."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        return hidden_states, None


class Deaf(LlamaAttention):
    """Does not hear what the caller says beside the tokens, as in families with an older interface."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        known = {name: arguments[name] for name in ("position_embeddings", "attention_mask")}
        return super().forward(hidden_states, **known)


class Biased(LlamaAttention):
    """Adds to its own softmax what the engine does not know of: here, half of the scale."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        if self.config._attn_implementation != "eager":
            self.scaling = self.head_dim**-0.5 / 2
        return super().forward(hidden_states, **arguments)


def adopt(attention: type[LlamaAttention], layer: int) -> Model:
    torch.manual_seed(3)
    network = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    held = network.model.layers[layer]
    other = attention(network.config, layer)
    other.load_state_dict(held.self_attn.state_dict())
    held.self_attn = other
    return adopt_model(network, Identity("tiny", "seed-3"), "float32")


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (Twice, "exactly once (layer 1 writes them 2 times)"),
        (Never, "exactly once (layer 1 writes them 0 times)"),
        (Biased, "those of the library alone (off by"),
    ],
)
def test_attention_that_the_engine_would_get_wrong_is_refused_in_one_line(
    attention: type[LlamaAttention], said: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        adopt(attention, 1)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attention", [LlamaAttention, Deaf])
def test_the_same_model_with_plain_attention_is_served(attention: type[LlamaAttention]) -> None:
    assert adopt(attention, 1).spec.layers == SIZES["num_hidden_layers"]


def test_a_window_that_the_layers_do_not_tell_of_is_refused() -> None:
    """Llama's masks and layers know of none, so this is a family that hides it."""
    network = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    network.config.sliding_window = 50
    with pytest.raises(UnsupportedModel, match="tell the engine of their window"):
        adopt_model(network, Identity("tiny", "window"), "float32")


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    network = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        network.model.norm.weight.fill_(float("inf"))
    with pytest.raises(UnsupportedModel, match="finite in float32"):
        adopt_model(network, Identity("tiny", "inf"), "float32")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_is_served_in_every_dtype(family: str, dtype: str) -> None:
    network = build_pair(family).reference.to(getattr(torch, dtype))
    assert adopt_model(network, Identity(family, "seed-7"), dtype, block_tokens=4).spec.dtype == dtype
