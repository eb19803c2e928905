"""Namespaces of models: what changes bytes changes the id, by name; models that cannot be shared are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

from kvstore.core.decoders import Identity, check_supported, spec_of
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec
from kvstore.engine.config import EngineConfig
from tests.engine.families import FAMILIES, SIZES

IDENTITY = Identity("model", "revision")


def llama_spec(identity: Identity = IDENTITY, dtype: str = "float32", **options: Any) -> NamespaceSpec:
    return spec_of(LlamaConfig(**SIZES), identity, dtype, **options)


def rope(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


DYNAMIC = {**rope(1e4), "rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        (llama_spec(dtype="bfloat16"), ("dtype",)),
        (llama_spec(Identity("model", "other")), ("revision",)),
        (llama_spec(Identity("other", "revision")), ("model",)),
        (llama_spec(block_tokens=32), ("block_tokens",)),
        (llama_spec(salt=b"tenant"), ("salt",)),
        (llama_spec(codec="int8"), ("codec",)),
        (spec_of(LlamaConfig(**SIZES, rope_parameters=rope(5e5)), IDENTITY, "float32"), ("rope",)),
        (spec_of(LlamaConfig(**SIZES, rms_norm_eps=1e-3), IDENTITY, "float32"), ("extra",)),
        (spec_of(LlamaConfig(**SIZES, hidden_act="gelu"), IDENTITY, "float32"), ("extra",)),
    ],
)
def test_a_setting_that_changes_bytes_is_named(other: NamespaceSpec, fields: tuple[str, ...]) -> None:
    assert llama_spec().differing_fields(other) == fields
    assert llama_spec().namespace_id != other.namespace_id


def test_windows_change_the_bytes_of_later_layers() -> None:
    specs = [spec_of(MistralConfig(**SIZES, sliding_window=w), IDENTITY, "float32") for w in (50, 60)]
    assert specs[0].differing_fields(specs[1]) == ("extra",)


def test_k_and_v_of_a_model_that_computes_in_another_dtype_are_others() -> None:
    kept, same = EngineConfig(kv_dtype="float16").spec_for(llama_spec()), llama_spec(dtype="float16")
    assert kept.geometry == same.geometry
    assert kept.differing_fields(same) == ("extra",)
    assert kept.differing_fields(llama_spec()) == ("dtype", "extra")
    assert EngineConfig(kv_dtype="float32").spec_for(llama_spec()) == llama_spec()
    with pytest.raises(InvalidArgument, match="float12"):
        EngineConfig(kv_dtype="float12").spec_for(llama_spec())


def test_what_changes_no_bytes_changes_nothing() -> None:
    sizes = {**SIZES, "max_position_embeddings": 99, "eos_token_id": 5}
    assert spec_of(LlamaConfig(**sizes, use_cache=False), IDENTITY, "float32") == llama_spec()


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_come_from_the_configuration(family: str) -> None:
    config = FAMILIES[family]()
    spec = spec_of(config, IDENTITY, "float32")
    expected_dim = {"qwen3": 16, "gemma2": 32, "gemma3": 32}.get(family, 12)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens) == (3, 2, expected_dim, 64)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("config.rope_parameters.rope_type", LlamaConfig(**SIZES, rope_parameters=DYNAMIC)),
        ("config.use_bidirectional_attention", Gemma3TextConfig(**SIZES, use_bidirectional_attention=True)),
    ],
)
def test_models_whose_prefixes_cannot_be_shared_are_refused(field: str, config: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_supported(config)
    assert caught.value.field == field


def test_other_attention_is_refused() -> None:
    config = LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(InvalidArgument, match="linear_attention"):
        check_supported(config)
