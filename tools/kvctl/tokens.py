"""Where the blocks of a question come from: token ids, a text and a tokenizer, or keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument

TOKENIZER_FILE: Final = "tokenizer.json"
_TOKEN_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The options of a command that takes tokens; exactly one of ``tokens`` and ``text`` is set.

    Either may be ``@FILE`` or ``-`` for standard input.
    """

    tokens: str = ""
    text: str = ""
    model: str = ""

    def refuse_beside_keys(self) -> None:
        """Raise InvalidArgument if tokens or a text are given where keys are, too."""
        if self.tokens or self.text:
            raise InvalidArgument("KEY", "given beside --tokens or --text", "one of them")

    def read(self) -> list[int]:
        """The token ids. InvalidArgument names the option that is wrong."""
        if bool(self.tokens) == bool(self.text):
            given = "both" if self.tokens else "neither"
            raise InvalidArgument(
                "--tokens and --text", given, "one of them: --tokens 1,2,3, or --text TEXT --model FOLDER"
            )
        if self.tokens:
            return parse_tokens(_content("--tokens", self.tokens))
        return _tokenize(_content("--text", self.text), self.model)


def parse_tokens(text: str) -> list[int]:
    """Token ids of a JSON list, or numbers apart by commas or blanks."""
    stripped = text.strip()
    try:
        found = (
            json.loads(stripped) if stripped.startswith("[") else [int(w) for w in stripped.replace(",", " ").split()]
        )
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            "--tokens", repr(stripped[:40]), "whole numbers, apart by commas, or a JSON list"
        ) from error
    for position, token in enumerate(found):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= _TOKEN_MAX:
            raise InvalidArgument(f"--tokens[{position}]", repr(token), f"a whole number, 0 to {_TOKEN_MAX}")
    return found


def parse_keys(keys: Sequence[str]) -> list[bytes]:
    """Whole keys or starts of keys, given in hexadecimal."""
    found = []
    for key in keys:
        try:
            found.append(bytes.fromhex(key))
        except ValueError as error:
            raise InvalidArgument("KEY", repr(key), "an even number of hexadecimal digits, 8 at least") from error
        if not 4 <= len(found[-1]) <= 32:
            raise InvalidArgument("KEY", repr(key), "8 to 64 hexadecimal digits")
    return found


def _content(option: str, value: str) -> str:
    if value == "-":
        return sys.stdin.read()
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(option, repr(value), f"a readable UTF-8 file ({error})") from error


def _tokenize(text: str, model: str) -> list[int]:
    if not model:
        raise InvalidArgument(
            "--model", "not given", "the folder of the model or its tokenizer.json, to cut --text into tokens"
        )
    path = Path(model) / TOKENIZER_FILE if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise InvalidArgument("--model", repr(model), f"a folder that holds {TOKENIZER_FILE}, or that file")
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - of the extra "engine"; other sources of tokens do without
    except ImportError as error:
        raise InvalidArgument(
            "--text", "a text", "--tokens, or pip install 'tiered-kvstore[engine]' for a tokenizer"
        ) from error
    try:
        return list(Tokenizer.from_file(str(path)).encode(text).ids)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower, for a file or a text it can not read
        reason = " ".join(str(error).split())[:200]
        raise InvalidArgument("--model", repr(model), f"one whose tokenizer cuts the text ({reason})") from error
