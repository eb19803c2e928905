"""A small GGUF file, written here, becomes a folder that transformers and the engine load."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.engine.gguf import convert
from kvstore.engine.weights import identity_of, load_model
from tests.engine.families import build_pair

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())[:208]
TOKENS = ["<|end|>", "<tool>", *ALPHABET, "ab"]

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def write_gguf(path: Path, family: str, *, named: bool = True) -> dict[str, torch.Tensor]:
    """Write the family's small random model; returns its weights by transformers' names."""
    reference = build_pair(family).reference
    config, weights = reference.config, dict(reference.state_dict())
    writer = gguf.GGUFWriter(path, family)
    if named:
        writer.add_name(f"tiny {family}")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 4, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}<tool>")
    for name, tensor in weights.items():
        writer.add_tensor(gguf_name(name), permuted(name, tensor, config) if family == "llama" else tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permuted(name: str, tensor: torch.Tensor, config: object) -> np.ndarray:
    """Rows of q and k as llama.cpp keeps them: the two halves of a head interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}  # type: ignore[attr-defined]
    part = name.split(".")[-2]
    if part not in heads:
        return tensor.numpy()
    rows = tensor.shape[0] // heads[part]
    halves = tensor.reshape(heads[part], 2, rows // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous().numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_come_back_exactly(tmp_path: Path, family: str) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", family)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.state_dict().keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens = torch.tensor([[3, 5, 8, 13, 21, 34]])
    with torch.inference_mode():
        expected = build_pair(family).reference(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_the_engine_loads_a_file_and_names_it_by_its_bytes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    model = load_model(tmp_path / "tiny.gguf")
    assert model.spec.model == "tiny llama"
    assert model.spec.revision.startswith("gguf-sha256:")
    assert model.eos_ids == {0}
    assert model.text is not None
    assert model.text.decode(model.text.encode("xab<tool>b1")) == "xab<tool>b1"
    assert model.text.encode("ab<tool>") == [TOKENS.index("ab"), 1]
    assert model.text.chat([{"role": "user", "content": "ab"}]) == [TOKENS.index("ab"), 1]
    assert load_model(tmp_path / "tiny.gguf").spec == model.spec


def test_a_converted_folder_is_kept_and_a_changed_file_converted_again(tmp_path: Path) -> None:
    source, folder = tmp_path / "tiny.gguf", tmp_path / "hf"
    write_gguf(source, "llama")
    convert(source, folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(source, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    write_gguf(source, "qwen2")
    convert(source, folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "tiny.gguf"]


def test_a_folder_of_safetensors_is_named_by_a_digest(tmp_path: Path) -> None:
    revisions = []
    for family in ("llama", "qwen2"):
        folder = tmp_path / family / "model"
        build_pair(family).reference.save_pretrained(folder)
        found = identity_of(folder)
        assert found.name == f"{family}-{found.revision.removeprefix('sha256:')[:12]}"
        revisions.append(found.revision)
        assert load_model(folder).spec.revision == found.revision
    assert revisions[0] != revisions[1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "gguf.rope.scaling.type"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "gguf.tokenizer.ggml.pre"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, str], field: str
) -> None:
    write_changed(tmp_path / "tiny.gguf", changes)
    with pytest.raises(InvalidArgument) as caught:
        convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert caught.value.field == field
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def write_changed(path: Path, changes: dict[str, str]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", **changes}
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 8)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in values.items():
        writer.add_string(name, value)
    writer.add_token_list(TOKENS)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model at all" * 10)
    with pytest.raises(InvalidArgument, match="GGUF"):
        load_model(tmp_path / "x.gguf")
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_model(tmp_path)
