"""Weights from a folder in the Hugging Face layout or from a GGUF file, with the names that keys are made of.

A GGUF file is converted once into a folder (``gguf.py``) and loaded from there, so there is one way to load. The
revision of a model is a digest of its weights: a name alone does not pin the bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec
from kvstore.engine.attention import ATTENTION_NAME, register_attention
from kvstore.engine.gguf import SOURCE_FILE, Progress, convert, sha256_of
from kvstore.engine.namespace import Identity, spec_of
from kvstore.engine.text import TextCodec

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder ready to run: the library's module, its namespace, and its tokenizer where the folder has one.

    ``eos_ids`` are the tokens that end an answer. ``network`` was put into evaluation mode and attends through
    ``attention.py``; nothing else may run it while an engine does.
    """

    network: Any
    spec: NamespaceSpec
    text: TextCodec | None = None
    eos_ids: frozenset[int] = frozenset()

    @property
    def positions_max(self) -> int:
        """Tokens that a sequence may have, prompt and answer together."""
        return int(self.network.config.max_position_embeddings)


def use_threads(count: int) -> None:
    """Let torch compute on ``count`` threads. Raises InvalidArgument below 1."""
    if count < 1:
        raise InvalidArgument("threads", count, "at least 1")
    torch.set_num_threads(count)


def load_model(
    path: Path,
    *,
    dtype: str = "float32",
    codec: str = "raw",
    salt: bytes = b"",
    cache_folder: Path | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a folder or a GGUF file. Raises InvalidArgument naming what is wrong with the path or the model.

    ``cache_folder`` is where a GGUF file is converted; without it, beside the file with ``.hf`` after its name.
    """
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
    if path.is_file():
        path = convert(path, cache_folder or path.with_name(path.name + ".hf"), progress)
    if not (path / "config.json").is_file():
        raise InvalidArgument("model", str(path), "a folder with config.json and safetensors files, or a GGUF file")
    register_attention()
    network = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME, local_files_only=True
    )
    text = TextCodec.load(path) if (path / "tokenizer.json").is_file() else None
    return adopt_model(network, identity_of(path), dtype, text=text, codec=codec, salt=salt)


def adopt_model(
    network: Any, identity: Identity, dtype: str, *, text: TextCodec | None = None, **options: Any
) -> Model:
    """Make a Model of a module that is loaded already; ``options`` go to ``namespace.spec_of``."""
    register_attention()
    spec = spec_of(network.config, identity, dtype, **options)
    network.set_attn_implementation(ATTENTION_NAME)
    network.eval()
    return Model(network, spec, text, _eos_ids(network))


def identity_of(folder: Path) -> Identity:
    """Name and revision of the model in a folder: its source's, or the folder's name and a digest of its weights."""
    source = folder / SOURCE_FILE
    if source.is_file():
        found = json.loads(source.read_text())
        return Identity(str(found["name"]), f"gguf-sha256:{found['sha256']}")
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidArgument("model", str(folder), "a folder that holds *.safetensors")
    for file in files:
        digest.update(f"{file.name}:{sha256_of(file)}\n".encode())
    return Identity(folder.resolve().name, f"sha256:{digest.hexdigest()}")


def _eos_ids(network: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (network.config, getattr(network, "generation_config", None)):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or ())
    return frozenset(found)
