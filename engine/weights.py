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

from kvstore.core.decoders import Identity, UnsupportedModel, spec_of
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec
from kvstore.engine.attention import ATTENTION_NAME, register_attention
from kvstore.engine.digests import remembered_sha256
from kvstore.engine.gguf import SOURCE_FILE, Progress, convert
from kvstore.engine.proving import prove
from kvstore.engine.text import TextCodec

THREADS_MAX: Final = 1024
CONFIG_FILE: Final = "config.json"
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder ready to run: the library's module, its namespace, and its tokenizer where the folder has one.

    ``eos_ids`` are the tokens that end an answer, ``windows`` the sliding window of each layer (None: all tokens).
    ``network`` was put into evaluation mode and attends through ``attention.py``; nothing else may run it while an
    engine does.
    """

    network: Any
    spec: NamespaceSpec
    text: TextCodec | None = None
    eos_ids: frozenset[int] = frozenset()
    windows: tuple[int | None, ...] = ()

    @property
    def positions_max(self) -> int:
        """Tokens that a sequence may have, prompt and answer together."""
        return int(self.network.config.max_position_embeddings)


def use_threads(count: int) -> None:
    """Let torch compute on ``count`` threads. Raises InvalidArgument for none or too many."""
    if not 1 <= count <= THREADS_MAX:
        raise InvalidArgument("threads", count, f"1 to {THREADS_MAX}")
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
    """Load a folder or a GGUF file. Raises InvalidArgument naming what is wrong with the path or an argument, of these
    UnsupportedModel for the model.

    ``cache_folder`` is where a GGUF file is converted; without it, beside the file with ``.hf`` after its name.
    """
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
    if path.is_file():
        path = convert(path, cache_folder or path.with_name(path.name + ".hf"), progress)
    if not (path / CONFIG_FILE).is_file():
        raise InvalidArgument("model", str(path), "a folder with config.json and safetensors files, or a GGUF file")
    identity, network = identity_of(path), _network(path, dtype)
    text = _text(path) if (path / "tokenizer.json").is_file() else None
    return adopt_model(network, identity, dtype, text=text, codec=codec, salt=salt)


def _text(path: Path) -> TextCodec:
    """The folder's tokenizer. Raises UnsupportedModel with the library's reason in one line."""
    try:
        return TextCodec.load(path)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower for a broken file
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel("model", str(path), f"a folder whose tokenizer.json can be read ({reason})") from error


def _network(path: Path, dtype: str) -> Any:
    """The library's module with all of its weights. Raises UnsupportedModel with the library's reason in one line."""
    register_attention()
    try:
        network, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # noqa: BLE001 - whatever a model's files make the library raise is about the model
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel("model", str(path), f"one that the library loads ({reason})") from error
    missing = sorted(found.get("missing_keys", ()))
    if missing:
        # The library makes random weights of these, with a warning.
        names = f"{', '.join(missing[:3])} and {len(missing) - 3} more" if len(missing) > 3 else ", ".join(missing)
        raise UnsupportedModel("model", str(path), f"a folder with all weights, also {names}")
    return network


def adopt_model(
    network: Any, identity: Identity, dtype: str, *, text: TextCodec | None = None, **options: Any
) -> Model:
    """Make a Model of a module that is loaded already; ``options`` go to ``namespace.spec_of``.

    Raises UnsupportedModel if the engine's path does not compute what the module alone does (``proving.py``).
    """
    register_attention()
    try:
        spec = spec_of(network.config, identity, dtype, **options)
    except (AttributeError, TypeError) as error:
        # A family whose configuration lacks, or calls by other names, what a spec is made of.
        raise UnsupportedModel("model", identity.name, f"a decoder with the usual configuration ({error})") from error
    network.set_attn_implementation(ATTENTION_NAME)
    network.eval()
    windows = prove(network, spec)
    return Model(network, spec, text, _eos_ids(network), windows)


def identity_of(folder: Path) -> Identity:
    """Name and revision of the model in a folder, wherever it lies: its source's, or its family and a digest of its
    weights. Raises InvalidArgument where there are none.
    """
    source = folder / SOURCE_FILE
    if source.is_file():
        found = json.loads(source.read_text())
        return Identity(str(found["name"]), f"gguf-sha256:{found['sha256']}")
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel("model", str(folder), "a folder that holds *.safetensors")
    for file in files:
        digest.update(f"{file.name}:{remembered_sha256(file)}\n".encode())
    try:
        family = str(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(
            "model", str(folder / CONFIG_FILE), f"a JSON object with model_type ({error})"
        ) from error
    return Identity(f"{family}-{digest.hexdigest()[:12]}", f"sha256:{digest.hexdigest()}")


def _eos_ids(network: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (network.config, getattr(network, "generation_config", None)):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or ())
    return frozenset(found)
