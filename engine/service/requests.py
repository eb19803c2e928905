"""What clients send, read and checked: a field that would be ignored is refused instead.

``Fields`` takes one field after the other, each with what it may be; what is left over at the end is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from kvstore.core.errors import InvalidArgument
from kvstore.engine.params import SamplingParams, Selected
from kvstore.engine.service.limits import Limits

COMPLETION_TOKENS: Final = 16
"""Tokens of a completion that names no number, as in OpenAI's API; a chat goes on to the model's last position."""

ABOUT_THE_CALLER: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that change no answer, and are let through."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),
}
"""Fields that this service has not: accepted only with values that ask for nothing."""

_Value = TypeVar("_Value")


class BadRequest(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``prompts`` of a completion, or the ``messages`` of a chat; ``choices`` answers to each.

    ``tokens_max`` None goes on to the model's last position.
    """

    prompts: tuple[str | list[int], ...]
    messages: tuple[dict[str, str], ...] | None
    params: SamplingParams
    tokens_max: int | None
    choices: int
    stream: bool
    include_usage: bool
    timeout_s: float | None
    priority: int

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.messages is not None

    def params_of(self, choice: int, room: int) -> SamplingParams:
        """Of one answer with ``room`` positions left; each has a seed of its own, so that they differ.

        Raises BadRequest where more tokens are asked for than fit.
        """
        if self.tokens_max is not None and self.tokens_max > room:
            message = f"max_tokens is {self.tokens_max}, and the model has room for {room} tokens after this prompt"
            raise BadRequest(message, "max_tokens", code="context_length_exceeded")
        seed = None if self.params.seed is None else (self.params.seed + choice) % (1 << 64)
        return replace(self.params, tokens_max=self.tokens_max or room, seed=seed)


class Fields:
    """The fields of a JSON object."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body is no JSON object")
        self._left = {str(name): value for name, value in body.items()}

    def take(self, name: str, default: _Value, check: Callable[[Any], bool], expected: str) -> _Value:
        """A field, or ``default`` where it is absent or null. Raises BadRequest saying what was expected."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not check(value):
            raise BadRequest(f"{name} must be {expected}", name)
        found: _Value = value
        return found

    def has(self, name: str) -> bool:
        """Whether the field was given and not taken."""
        return self._left.get(name) is not None

    def finish(self) -> None:
        """Raise BadRequest for a field that is left over and would change the answer."""
        for name, value in self._left.items():
            if name in ABOUT_THE_CALLER or value in NEUTRAL.get(name, (None,)):
                continue
            known = name in NEUTRAL
            raise BadRequest(f"{name} {'with this value is' if known else 'is'} not supported", name)


def read_completion(body: object, limits: Limits) -> Asked:
    """A body of ``/v1/completions``. Raises BadRequest."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt", "", _is_prompt, "a text, token ids, or a list of these"))
    if len(prompts) > limits.choices_max:
        raise BadRequest(f"prompt holds {len(prompts)} prompts, more than {limits.choices_max}", "prompt")
    tokens_max = fields.take("max_tokens", COMPLETION_TOKENS, _is_count, "a number of at least 1")
    logprobs = fields.take("logprobs", None, lambda v: _is_int(v) and 0 <= v <= 20, "0 to 20")
    best_of = fields.take("best_of", None, _is_count, "the same as n, or absent")
    asked = _common(fields, limits, prompts, None, tokens_max, logprobs)
    if best_of not in (None, asked.choices):
        raise BadRequest("best_of must be the same as n, or absent", "best_of")
    return asked


def read_chat(body: object, limits: Limits) -> Asked:
    """A body of ``/v1/chat/completions``. Raises BadRequest."""
    fields = Fields(body)
    if not fields.has("messages"):
        raise BadRequest("messages is missing", "messages")
    messages: list[Any] = fields.take("messages", [], lambda v: isinstance(v, list) and v != [], "a list of messages")
    old = fields.take("max_tokens", None, _is_count, "a number of at least 1")
    tokens_max = fields.take("max_completion_tokens", old, _is_count, "a number of at least 1")
    wanted = fields.take("logprobs", False, lambda v: isinstance(v, bool), "true or false")
    top = fields.take("top_logprobs", 0, lambda v: _is_int(v) and 0 <= v <= 20, "0 to 20")
    if top and not wanted:
        raise BadRequest("top_logprobs needs logprobs", "top_logprobs")
    said = tuple(_message(message) for message in messages)
    return _common(fields, limits, (), said, tokens_max, top if wanted else None)


def _common(
    fields: Fields,
    limits: Limits,
    prompts: tuple[str | list[int], ...],
    messages: tuple[dict[str, str], ...] | None,
    tokens_max: int | None,
    logprobs: int | None,
) -> Asked:
    fields.take("model", "", lambda v: isinstance(v, str), "a text")
    stream = fields.take("stream", False, lambda v: isinstance(v, bool), "true or false")
    options: dict[str, Any] = fields.take("stream_options", {}, lambda v: isinstance(v, dict), "an object")
    choices = fields.take("n", 1, lambda v: _is_int(v) and 1 <= v <= limits.choices_max, f"1 to {limits.choices_max}")
    timeout_s = fields.take("timeout_s", None, lambda v: _is_number(v) and v > 0, "seconds, more than 0")
    priority = fields.take("priority", 0, lambda v: _is_int(v) and abs(v) <= 1000, "-1000 to 1000")
    params = _sampling(fields, logprobs)
    fields.finish()
    usage = options.get("include_usage") is True
    return Asked(prompts, messages, params, tokens_max, choices, stream, usage, timeout_s, priority)


def _attention(fields: Fields) -> Selected | None:
    """None for exact attention. The field is this server's own."""
    expected = '"exact", "selected", or {"mass": ..., "max_share": ...}, each above 0 and at most 1'
    asked: Any = fields.take("attention", "exact", lambda v: v in ("exact", "selected") or _is_shares(v), expected)
    if isinstance(asked, dict):
        return Selected(**asked)
    return Selected() if asked == "selected" else None


def _is_shares(value: object) -> bool:
    return isinstance(value, dict) and all(
        name in ("mass", "max_share") and _is_number(share) and 0 < share <= 1 for name, share in value.items()
    )


def _sampling(fields: Fields, logprobs: int | None) -> SamplingParams:
    seed = fields.take("seed", None, _is_int, "a whole number")
    stop: Any = fields.take("stop", [], _is_stop, "a text, or a list of at most 16 texts")
    tokens: list[int] = fields.take("stop_token_ids", [], lambda v: _is_list_of(v, _is_int), "token ids")
    temperature = fields.take("temperature", 1.0, lambda v: _is_number(v) and 0 <= v <= 100, "0 to 100")
    top_p = fields.take("top_p", 1.0, lambda v: _is_number(v) and 0 < v <= 1, "above 0, at most 1")
    top_k = fields.take("top_k", 0, lambda v: _is_int(v) and v >= -1, "0 (off) or more")
    attention = _attention(fields)
    ignore_eos = fields.take("ignore_eos", False, lambda v: isinstance(v, bool), "true or false")
    try:
        return SamplingParams(
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=max(0, top_k),
            seed=None if seed is None else seed % (1 << 64),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_tokens=frozenset(tokens),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            attention=attention,
        )
    except InvalidArgument as error:
        raise BadRequest(str(error)) from error


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("each message must be an object with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRequest("the parts of a message must be texts: this model reads nothing else", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequest("the content of a message must be a text", "messages")
    extra = set(message) - {"role", "content", "name", "refusal"}
    if extra:
        raise BadRequest(f"{min(extra)} of a message is not supported", "messages")
    return {"role": message["role"], "content": content}


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str) or (prompt and _is_int(prompt[0])):
        return (prompt,)
    return tuple(prompt)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_list_of(value, _is_int):
        return bool(value)
    return isinstance(value, list) and all((isinstance(v, str) or _is_list_of(v, _is_int)) and v for v in value)


def _is_stop(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return _is_list_of(value, lambda v: isinstance(v, str) and v != "") and len(value) <= 16


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(check(item) for item in value)
