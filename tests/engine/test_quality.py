"""The measure of a codec's quality: exact is exact, worse is worse, and int8 is the store's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.engine import quality
from kvstore.engine.quality import QualityProbe, through_int8
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant_reference import dequantise_slice, quantise_slice


@pytest.fixture(scope="module")
def probe():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return QualityProbe(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(2)).tolist()


def test_an_exact_codec_costs_nothing(probe, tokens, monkeypatch):
    monkeypatch.setitem(quality.CODECS, "exact", lambda key, value: (key.clone(), value.clone()))
    (found,) = probe.measure(tokens, ["exact"])
    assert (found.kl, found.same_argmax, found.attention_error) == (pytest.approx(0, abs=1e-12), 1.0, 0.0)
    assert found.perplexity == found.perplexity_exact
    assert found.tokens == 192


def test_coarser_codecs_cost_more(probe, tokens):
    fp16, bf16, int8 = probe.measure(tokens)
    assert 0 < fp16.attention_error < bf16.attention_error < 0.05
    assert 0 < fp16.kl < bf16.kl
    assert fp16.attention_error < int8.attention_error < 0.05
    assert int8.kl > fp16.kl


def test_the_exact_run_is_the_library_s(probe, tokens):
    ids = torch.tensor([tokens[:192]])
    (found,) = probe.measure(tokens, ["fp16"])
    network = probe._network
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        loss = float(network(input_ids=ids, labels=ids).loss)
    network.set_attn_implementation("kvstore_quality")
    assert found.perplexity_exact == pytest.approx(np.exp(loss), rel=1e-4)


def test_int8_is_that_of_the_slices():
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(2, 128, 16, generator=generator) for _ in range(2))
    keys, values = through_int8(key, value)
    geometry = SliceGeometry(2, 16, 64, "float32")
    for block in range(2):
        rows = slice(block * 64, block * 64 + 64)
        halves = [torch.stack([key[h, rows].T.reshape(-1), value[h, rows].reshape(-1)]) for h in range(2)]
        raw = torch.stack(halves).contiguous().numpy().view(np.uint8).reshape(-1)
        back = torch.from_numpy(dequantise_slice(quantise_slice(raw, geometry), geometry).view(np.float32).copy())
        for head, (k, v) in enumerate(back.view(2, 2, -1)):
            assert torch.equal(keys[head, rows], k.view(16, 64).T)
            assert torch.equal(values[head, rows], v.view(64, 16))


def test_wrong_input_is_named(probe, tokens):
    for words, call in {
        "codec": lambda: probe.measure(tokens, ["fp4"]),
        "text": lambda: probe.measure(tokens[:100]),
        "512": lambda: probe.measure(tokens * 4),
    }.items():
        with pytest.raises(InvalidArgument, match=words):
            call()
