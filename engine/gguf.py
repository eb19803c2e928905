"""GGUF files turned into a folder in the Hugging Face layout, once, so that loading is a plain load afterwards.

The folder holds ``model.safetensors`` (every tensor dequantised to fp32, exactly as the file's own arithmetic says),
``config.json``, ``tokenizer.json``, ``tokenizer_config.json`` and ``source.json``, which names the file it came from
by SHA-256 and is written last: a folder is whole if and only if ``source.json`` is there.

llama.cpp stores the rows of the q and k projections of Llama models in pairs for its rotary embedding
(row ``2 i + j`` of a head is row ``i + j * head_dim / 2`` here); ``_unpermute`` puts them back. Qwen models are
stored as they are.

Own code, though transformers reads GGUF: it refuses to save what it read, so that each start would convert again, which
took 27 s for SmolLM2 where this takes 15 s once. Both give equal weights: ``tests/engine/test_gguf_transformers.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

from kvstore.core.errors import InvalidArgument
from kvstore.engine.digests import remembered_sha256
from kvstore.engine.gguf_tokenizer import tokenizer_config, tokenizer_json

CONVERTER_VERSION: Final = 1
SOURCE_FILE: Final = "source.json"

Progress = Callable[[str, int, int], None]
"""Told what is being done, how far it is and how far it goes."""

_ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GLOBAL_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of a GGUF file that matters here: architecture and a getter that knows its prefix."""

    architecture: str
    reader: Any

    def field(self, name: str, default: Any = None) -> Any:
        """Value of ``name`` ("tokenizer.ggml.model"), or ``default`` where the file lacks it."""
        found = self.reader.fields.get(name)
        return default if found is None else found.contents()

    def setting(self, name: str, default: Any = None) -> Any:
        """Value of the architecture's own ``name`` ("block_count")."""
        return self.field(f"{self.architecture}.{name}", default)

    def required(self, name: str) -> Any:
        """Like ``setting``; raises InvalidArgument naming the key that is missing."""
        value = self.setting(name)
        if value is None:
            raise InvalidArgument(f"gguf.{self.architecture}.{name}", "missing", "a value")
        return value


def convert(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """Convert the GGUF file ``source`` into the folder ``target`` and return it.

    A folder that is whole and names this file's SHA-256 is kept. The new folder appears by one rename, so a broken
    conversion leaves nothing. Raises InvalidArgument for a file that is no GGUF, for an architecture that is not one
    of llama, qwen2, qwen3, or for a rope scaling that the file asks for (none of these have one here).
    """
    if not source.is_file():
        raise InvalidArgument("source", str(source), "a GGUF file")
    digest = remembered_sha256(source)
    if is_converted(target, digest):
        return target
    header = read_header(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        config = model_config(header)
        save_file(_tensors(header, config, progress), work / "model.safetensors", metadata={"format": "pt"})
        _write_json(work / "config.json", config)
        _write_json(work / "tokenizer.json", tokenizer_json(header.field))
        _write_json(work / "tokenizer_config.json", tokenizer_config(header.field))
        # Not the file's own name: the same bytes under another one are the same model.
        name = header.field("general.name") or f"{header.architecture}-{digest[:12]}"
        _write_json(work / SOURCE_FILE, {"converter": CONVERTER_VERSION, "name": name, "sha256": digest})
        # Both were made for their maker only, as temporary files are; a model is for everyone to read.
        work.chmod(0o755)
        (work / "model.safetensors").chmod(0o644)
        if target.exists():
            shutil.rmtree(target)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def is_converted(folder: Path, digest: str) -> bool:
    """True if ``folder`` is a whole conversion, by this version, of the file with this SHA-256."""
    path = folder / SOURCE_FILE
    if not path.is_file():
        return False
    found = json.loads(path.read_text())
    return bool(found.get("sha256") == digest and found.get("converter") == CONVERTER_VERSION)


def read_header(source: Path) -> GgufHeader:
    """Open the file and check that it holds a model that can be converted."""
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise InvalidArgument("source", str(source), f"a GGUF file ({error})") from error
    header = GgufHeader(str(reader.fields["general.architecture"].contents()), reader)
    if header.architecture not in _ARCHITECTURES:
        raise InvalidArgument(
            "gguf.general.architecture", repr(header.architecture), f"one of {', '.join(_ARCHITECTURES)}"
        )
    scaling = header.setting("rope.scaling.type", "none")
    if scaling != "none" or any(tensor.name.startswith("rope_freqs") for tensor in reader.tensors):
        raise InvalidArgument("gguf.rope.scaling.type", scaling, "none; use the model's safetensors folder instead")
    return header


def model_config(header: GgufHeader) -> dict[str, Any]:
    """The ``config.json`` of the converted model."""
    model_type, class_name = _ARCHITECTURES[header.architecture]
    heads, hidden = header.required("attention.head_count"), header.required("embedding_length")
    head_dim = header.setting("attention.key_length") or header.setting("rope.dimension_count") or hidden // heads
    names = {tensor.name for tensor in header.reader.tensors}
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": header.required("feed_forward_length"),
        "num_hidden_layers": header.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.setting("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.required("context_length"),
        "rms_norm_eps": header.required("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.setting("rope.freq_base", 10000.0)},
        "vocab_size": len(header.field("tokenizer.ggml.tokens", [])) or header.required("vocab_size"),
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
    }
    for key in ("bos", "eos", "padding"):
        token = header.field(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{'pad' if key == 'padding' else key}_token_id"] = token
    return config


def _tensors(
    header: GgufHeader, config: dict[str, Any], progress: Progress | None
) -> dict[str, npt.NDArray[np.float32]]:
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    total = len(header.reader.tensors)
    for index, tensor in enumerate(header.reader.tensors):
        if progress is not None:
            progress("converting tensors", index, total)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if header.architecture == "llama" and part in heads:
            values = _unpermute(values, heads[part])
        tensors[_hf_name(tensor.name)] = np.ascontiguousarray(values)
    if progress is not None:
        progress("converting tensors", total, total)
    return tensors


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[parts[0]]}.{parts[1]}"
    raise InvalidArgument("gguf.tensor", repr(name), "a tensor of a plain decoder; this one is not known")


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's pairing of rotary rows: [rows, columns] or [rows], rows = heads * head_dim."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1))
