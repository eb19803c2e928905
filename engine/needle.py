"""A constructed decoder that finds needles at any distance: a model whose right answers are known, without training.

Two layers in SmolLM3's configuration, which has layers without RoPE and sliding windows. The residual stream is four
parts: the token's embedding E, the previous token's P, the answer A, and a constant::

    layer 0  window of 4 tokens, RoPE: query and key come from the constant, turned so that their product is largest at
             a distance of one token; the value E of the token before goes to P
    layer 1  all tokens, no RoPE: query E, key P, so the query finds the tokens that followed its own token before;
             their E goes to A
    head     the token whose embedding is nearest to A

So ``key value ... key`` is followed by ``value`` (an induction head). Embeddings are random unit vectors; those of keys
have one half of the channels and those of all other tokens the other half, so that a digest of a block can tell whether
it holds a key (of random vectors over all channels it could not: the mean of 64 says nothing of one). A token that
followed another one weighs ``exp(-SHARPNESS * (1 - p))`` beside the right one, p being the product of the two
embeddings: ``margin`` is the smallest exponent over the whole vocabulary, and what is left of the weight of the right
token among N others is more than ``1 - N * exp(-margin)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from kvstore.core.errors import InvalidArgument

VOCABULARY: Final = 8192
WIDTH: Final = 128
"""Of an embedding, and of a head."""
HIDDEN: Final = 3 * WIDTH + 32
POSITIONS_MAX: Final = 1 << 24
"""Up to here a position is exact in float32."""
WINDOW: Final = 4
SHARPNESS: Final = 140.0
"""Score of layer 1 for the right token. 1,000,000 others are drowned by a margin of 14 and more; the rest is for K that
was rounded."""
NEIGHBOUR: Final = 130.0
"""Score of layer 0 at a distance of one token; at a distance of none or two it is lower by 46 %."""
MARGIN_MIN: Final = 40.0

_E, _P, _A, _ONE = slice(0, WIDTH), slice(WIDTH, 2 * WIDTH), slice(2 * WIDTH, 3 * WIDTH), 3 * WIDTH

START: Final = 0
"""The first token of a prompt: one without a token before it looks as if it followed itself."""
FILLERS: Final = range(16, 4096)
KEYS: Final = range(4096, 6144)
VALUES: Final = range(6144, VOCABULARY)


@dataclass(frozen=True, slots=True)
class Haystack:
    """Token ids to ask the model with: ``tokens`` is filler with needles, ``answers`` the value of each key in it."""

    tokens: list[int]
    answers: dict[int, int]

    def ask(self, key: int) -> list[int]:
        """The prompt whose next token is ``answers[key]``."""
        return [*self.tokens, key]


def make_haystack(length: int, depths: tuple[float, ...], seed: int) -> Haystack:
    """``length`` tokens, the first one START, with a needle (a key and its value) at each depth: 0 is the start and 1
    the end; no key comes twice.

    Raises InvalidArgument where the needles do not fit.
    """
    if any(not 0.0 <= depth <= 1.0 for depth in depths):
        raise InvalidArgument("depths", depths, "numbers from 0 to 1")
    places = [1 + round(depth * (length - 3)) for depth in depths]
    if len(set(places)) < len(places):
        raise InvalidArgument("depths", depths, f"{len(places)} places in {length} tokens")
    return plant_needles(length, places, seed)


def plant_needles(length: int, places: Sequence[int], seed: int) -> Haystack:
    """As ``make_haystack``, with a needle's key at each of ``places``; one that is named twice is planted once."""
    starts = sorted(places)
    starts = [start for index, start in enumerate(starts) if index == 0 or start != starts[index - 1]]
    if len(starts) > len(KEYS) or length < 3 or any(b - a < 2 for a, b in pairwise([-1, *starts, length])):
        raise InvalidArgument("length", length, f"enough tokens for {len(starts)} needles of two at these places")
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FILLERS.start, FILLERS.stop, (length,), generator=draw).tolist()
    keys = (torch.randperm(len(KEYS), generator=draw)[: len(starts)] + KEYS.start).tolist()
    values = (torch.randperm(len(VALUES), generator=draw)[: len(starts)] + VALUES.start).tolist()
    tokens[0] = START
    for start, key, value in zip(starts, keys, values, strict=True):
        tokens[start : start + 2] = [key, value]
    return Haystack(tokens, dict(zip(keys, values, strict=True)))


def make_needle_model(folder: Path, seed: int) -> float:
    """Write the model to ``folder`` in the layout of Hugging Face, 27 MB of float32; returns its margin.

    The same seed gives the same bytes. Raises InvalidArgument for a seed whose embeddings lie too near to each other,
    and OSError where the folder can not be written.
    """
    drawn = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed))
    drawn[list(KEYS), : WIDTH // 2] = 0.0
    drawn[[*range(KEYS.start), *VALUES], WIDTH // 2 :] = 0.0
    embeddings = torch.nn.functional.normalize(drawn, dim=1)
    margin = SHARPNESS * (1.0 - _nearest(embeddings))
    if margin < MARGIN_MIN:
        raise InvalidArgument(
            "seed", seed, f"another one, whose margin is {MARGIN_MIN:g} at least and not {margin:.1f}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    network: Any = SmolLM3ForCausalLM(_config())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        network.model.embed_tokens.weight[:, _E] = embeddings
        network.model.embed_tokens.weight[:, _ONE] = 1.0
        _look_one_back(network.model.layers[0].self_attn)
        _find_what_followed(network.model.layers[1].self_attn)
        network.lm_head.weight[:, _A] = embeddings
    network.save_pretrained(folder)
    return margin


def _config() -> SmolLM3Config:
    return SmolLM3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=WIDTH,
        max_position_embeddings=POSITIONS_MAX,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        no_rope_layers=[1, 0],
        tie_word_embeddings=False,
        bos_token_id=START,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


def _look_one_back(attention: Any) -> None:
    """RoPE's first pair of channels turns by one radian a token: with the query a radian behind, the product of
    constants is ``NEIGHBOUR * cos(distance - 1)``."""
    size = _gain(NEIGHBOUR) / _norm_scale(parts=1)
    attention.q_proj.weight[0, _ONE] = size * math.cos(1.0)
    attention.q_proj.weight[WIDTH // 2, _ONE] = -size * math.sin(1.0)
    attention.k_proj.weight[0, _ONE] = size
    attention.v_proj.weight[:, _E] = torch.eye(WIDTH) / _norm_scale(parts=1)
    attention.o_proj.weight[_P, :] = torch.eye(WIDTH)


def _find_what_followed(attention: Any) -> None:
    size = _gain(SHARPNESS) / _norm_scale(parts=2)
    attention.q_proj.weight[:, _E] = size * torch.eye(WIDTH)
    attention.k_proj.weight[:, _P] = size * torch.eye(WIDTH)
    attention.v_proj.weight[:, _E] = torch.eye(WIDTH) / _norm_scale(parts=2)
    attention.o_proj.weight[_A, :] = torch.eye(WIDTH)


def _gain(score: float) -> float:
    """What query and key are multiplied with each so that unit vectors score ``score`` after the head's own scale."""
    return math.sqrt(score * math.sqrt(WIDTH))


def _norm_scale(parts: int) -> float:
    """What RMSNorm multiplies with where the stream holds the constant 1 and so many unit vectors."""
    return math.sqrt(HIDDEN / (parts + 1))


def _nearest(embeddings: torch.Tensor) -> float:
    """The largest product of two different embeddings."""
    largest = -1.0
    for begin in range(0, len(embeddings), 1024):
        products = embeddings[begin : begin + 1024] @ embeddings.T
        products.diagonal(begin).fill_(-1.0)
        largest = max(largest, float(products.max()))
    return largest
