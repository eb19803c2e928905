"""What clients get: answers, chunks of them, usage and errors, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.engine.engine import TokenOutput
from kvstore.engine.sequence import FinishReason

Spell = Callable[[int], str]
"""The text of one token, special ones included."""


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    prompt_tokens: int
    text: str = ""
    tokens: int = 0
    reason: FinishReason | None = None
    cached: int = 0
    logprobs: list[TokenOutput] = field(default_factory=list)

    def add(self, output: TokenOutput) -> None:
        """Take one output of the engine."""
        self.text += output.text
        self.reason = output.reason
        if output.token is not None:
            self.tokens += 1
            if output.logprobs is not None:
                self.logprobs.append(output)
        if output.cached_tokens:
            # One that was preempted found its prefix more than once.
            self.cached = min(sum(output.cached_tokens.values()), self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Form:
    """The frame of one request's replies."""

    reply_id: str
    created: int
    model: str
    chat: bool
    spell: Spell

    def whole(self, choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
        """The reply that is not streamed; ``per_prompt`` choices have the same prompt."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._frame(kind),
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage(choices, per_prompt),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of an answer of a chat."""
        if not self.chat:
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}, None)

    def piece(self, index: int, output: TokenOutput, offset: int) -> dict[str, Any]:
        """The chunk of one token; ``offset`` is the length of the answer's text before it."""
        told = [output] if output.logprobs is not None else []
        logprobs = self._logprobs(told, offset)
        if self.chat:
            delta = {"content": output.text} if output.text or output.reason is None else {}
            return self._chunk(index, {"delta": delta, "logprobs": logprobs}, output.reason)
        return self._chunk(index, {"text": output.text, "logprobs": logprobs}, output.reason)

    def usage_chunk(self, choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
        """The last chunk, where it was asked for."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._frame(kind), "choices": [], "usage": usage(choices, per_prompt)}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, index: int, body: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        ended = reason.value if reason is not None else None
        return {**self._frame(kind), "choices": [{"index": index, **body, "finish_reason": ended}]}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.logprobs, 0)
        body: dict[str, Any] = {"text": choice.text}
        if self.chat:
            body = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        reason = choice.reason.value if choice.reason is not None else None
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, outputs: Sequence[TokenOutput], offset: int) -> dict[str, Any] | None:
        if not outputs:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(output) for output in outputs], "refusal": None}
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for output in outputs:
            if output.token is None or output.logprobs is None:
                continue
            text = self.spell(output.token)
            told["tokens"].append(text)
            told["token_logprobs"].append(output.logprobs.logprob)
            told["top_logprobs"].append({self.spell(token): value for token, value in output.logprobs.top})
            told["text_offset"].append(offset)
            offset += len(text)
        return told

    def _chat_logprob(self, output: TokenOutput) -> dict[str, Any]:
        if output.token is None or output.logprobs is None:
            return {}
        top = [self._spelt(token, value) for token, value in output.logprobs.top]
        return {**self._spelt(output.token, output.logprobs.logprob), "top_logprobs": top}

    def _spelt(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """Tokens that were read and written. A prompt counts once, and its cached tokens are those of its first answer."""
    firsts = choices[::per_prompt]
    read, written = sum(choice.prompt_tokens for choice in firsts), sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
    }


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error of OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
