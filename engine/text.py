"""Text to tokens and back, and the watch for stop strings while tokens arrive one at a time.

A stop string may begin in the middle of one token and end in another, and a character may be spread over tokens; so
text is handed out only as far as no later token can change it or turn it into the start of a stop string.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvstore.core.errors import InvalidArgument

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A tokenizer and, where the model has one, its chat template."""

    tokenizer: Any
    chat_template: str | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read ``tokenizer.json`` and, if present, the template of ``tokenizer_config.json``."""
        config: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_text())
        template = config.get("chat_template")
        if template is None and (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text()
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and value
        }
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), template, tuple(special.items()))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with what the tokenizer itself puts around it."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins.

        ``messages`` are {"role", "content"}. Raises InvalidArgument where the model has no chat template.
        """
        if self.chat_template is None:
            raise InvalidArgument("messages", "a conversation", "plain text, since this model has no chat template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        template = environment.from_string(self.chat_template)
        text = template.render(messages=list(messages), add_generation_prompt=True, **dict(self.special_tokens))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _raise_template_error(message: str) -> None:
    """What chat templates call to refuse a conversation."""
    raise InvalidArgument("messages", "a conversation that the model's template refuses", message)


class TextStream:
    """The text of one answer as its tokens arrive.

    ``add`` returns what became certain; ``finish`` the rest. Once a stop string was seen ``stopped`` is True and the
    text ends before it.

    Own code, though tokenizers has a ``DecodeStream``: that one can only step, so that characters which the last token
    cut in the middle would be lost.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec = codec
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._settled = 0
        self._context = 0
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take one more token; returns text that no later token can change."""
        self._tokens.append(token)
        before = self._codec.decode(self._tokens[self._context : self._settled])
        now = self._codec.decode(self._tokens[self._context :])
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._context, self._settled = self._settled, len(self._tokens)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """The rest of the text: characters cut in the middle, and what was held back for a stop string."""
        if self.stopped:
            return ""
        before = self._codec.decode(self._tokens[self._context : self._settled])
        rest = self._codec.decode(self._tokens[self._context :])[len(before) :]
        self._context = self._settled = len(self._tokens)
        released = self._release(rest)
        held, self._held = self._held, ""
        return released if self.stopped else released + held

    def _release(self, text: str) -> str:
        whole = self._held + text
        found = [place for place in (whole.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return whole[: min(found)]
        keep = max((_overlap(whole, stop) for stop in self._stop), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
