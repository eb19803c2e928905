"""The measure of a codec's quality: exact is exact, worse is worse, and int8 is the store's own."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.engine import quality
from kvstore.engine.quality import QualityProbe
from kvstore.engine.quality_codecs import CODECS, ProbeCodec, through_fp8, through_int8, through_token_int8
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
    exact = ProbeCodec("exact", lambda key, value: (key.clone(), value.clone()), lambda _: 0, "for this test")
    monkeypatch.setitem(quality.CODECS, "exact", exact)
    (found,) = probe.measure(tokens, ["exact"])
    assert (found.kl, found.same_argmax, found.attention_error) == (pytest.approx(0, abs=1e-12), 1.0, 0.0)
    assert found.perplexity == found.perplexity_exact
    assert found.tokens == 192


def test_coarser_codecs_cost_more(probe, tokens):
    fp16, bf16, int8, plain, fp8 = probe.measure(tokens)
    assert [found.codec for found in (fp16, bf16, int8, plain, fp8)] == list(CODECS)
    assert 0 < fp16.attention_error < bf16.attention_error < 0.05
    assert 0 < fp16.kl < bf16.kl
    assert fp16.attention_error < int8.attention_error < 0.05
    assert int8.kl > fp16.kl
    assert int8.attention_error < plain.attention_error < fp8.attention_error
    assert plain.kl < fp8.kl


@pytest.mark.parametrize("rows", [1, 5, 191, 300])
def test_the_figures_are_those_of_whole_softmaxes_in_double(probe, tokens, monkeypatch, rows):
    """What one softmax over all rows says, with the states of both passes taken as they are."""
    monkeypatch.setattr(quality, "LOGIT_ROWS", rows)
    kept = []
    states = probe._states
    monkeypatch.setattr(probe, "_states", lambda ids, tap: kept.append(states(ids, tap)) or kept[-1])
    (found,) = probe.measure(tokens, ["fp8"])
    head = probe._network.get_output_embeddings()
    following = torch.tensor(tokens[1:192])
    with torch.inference_mode():
        exact, coded = (head(each[:-1]).double().log_softmax(-1) for each in kept)
    assert found.kl == pytest.approx(float((exact.exp() * (exact - coded)).sum(-1).mean()), rel=1e-4)
    assert found.same_argmax == float((exact.argmax(-1) == coded.argmax(-1)).double().mean())
    for value, logs in ((found.perplexity_exact, exact), (found.perplexity, coded)):
        assert value == pytest.approx(float(torch.exp(-logs[torch.arange(191), following].mean())), rel=1e-6)


def test_steps_are_shown_around_each_pass(probe, tokens):
    shown = []

    @contextmanager
    def step(name):
        shown.append(name)
        yield
        shown.append(f"{name} done")

    probe.measure(tokens, ["fp16", "int8"], step)
    names = ["exact", "fp16", "int8", "predictions"]
    assert shown == [word for name in names for word in (name, f"{name} done")]


@pytest.mark.parametrize(("code", "steps"), [(through_token_int8, 127), (through_fp8, 14)])
def test_codecs_with_a_scale_a_token_keep_each_token_within_half_a_step(code, steps):
    generator = torch.Generator().manual_seed(4)
    key, value = (torch.randn(2, 128, 16, generator=generator) for _ in range(2))
    value[1, 5] = 0
    value[0, 7] *= 1000
    for numbers, found in zip((key, value), code(key, value), strict=True):
        largest = numbers.abs().amax(-1, keepdim=True)
        # The scale is fp16, whose own rounding (0.0005) is on top of the half step.
        assert bool(((found - numbers).abs() <= largest * (0.5 / steps + 0.0006)).all())
    assert not torch.equal(found, value)


def test_the_bytes_of_each_codec_beside_fp16():
    shares = {name: codec.share_of_fp16(3, 64) for name, codec in CODECS.items()}
    assert shares == {
        "fp16": 1,
        "bf16": 1,
        "int8": pytest.approx(0.523, abs=0.0005),
        "int8-token": pytest.approx(0.516, abs=0.0005),
        "fp8": pytest.approx(0.516, abs=0.0005),
    }


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
