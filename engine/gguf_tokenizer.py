"""The tokenizer of a GGUF file as a ``tokenizer.json`` of the ``tokenizers`` package.

Byte-level BPE only ("gpt2" in GGUF's words): Llama 3, Qwen and SmolLM files. How text is cut before BPE is not in the
file; it names a cutter (``tokenizer.ggml.pre``), and the ones known here are in ``_PRE_TOKENIZERS``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvstore.core.errors import InvalidArgument

Field = Callable[..., Any]
"""Value of a metadata key, or the second argument where the file lacks it."""

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT: Final = _QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=use_regex)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(False)])


_PRE_TOKENIZERS: Final[dict[str, Callable[[], Any]]] = {
    "default": lambda: _byte_level(True),
    "gpt-2": lambda: _byte_level(True),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)]),
    "qwen2": lambda: _split(_QWEN_SPLIT),
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
}


def tokenizer_json(field: Field) -> dict[str, Any]:
    """The whole ``tokenizer.json``; raises InvalidArgument for a model or cutter that is not known here."""
    kind, cutter = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise InvalidArgument("gguf.tokenizer.ggml.model", repr(kind), "'gpt2' (byte-level BPE)")
    if cutter not in _PRE_TOKENIZERS:
        raise InvalidArgument("gguf.tokenizer.ggml.pre", repr(cutter), f"one of {', '.join(_PRE_TOKENIZERS)}")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    kinds: list[int] = field("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[cutter]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
    plain = [t for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    whole: dict[str, Any] = json.loads(tokenizer.to_str())
    return whole


def tokenizer_config(field: Field) -> dict[str, Any]:
    """The ``tokenizer_config.json``: special tokens by name, and the chat template."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(field("tokenizer.ggml.add_bos_token", False)),
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for key, name in names.items():
        index = field(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[name] = tokens[index]
    template = field("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
