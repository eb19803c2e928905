"""The loop that runs the prompts and times them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.engine.engine import Engine, TokenOutput
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.sequence import FinishReason, RequestId

Show = Callable[[str], None]


@dataclass(slots=True)
class Answer:
    """One prompt's answer. Times are seconds since all prompts were handed in; ``first_s`` is the first token's."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Rate of the tokens after the first one; 0 for a single token."""
        elapsed = self.last_s - self.first_s
        return (len(self.tokens) - 1) / elapsed if elapsed > 0 else 0.0

    def add(self, output: TokenOutput, seconds: float) -> None:
        """Take one output of the engine."""
        self.text += output.text
        self.reason = output.reason
        if output.token is not None:
            self.first_s = self.first_s or seconds
            self.last_s = seconds
            self.tokens.append(output.token)


def serve(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    show: Show | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """Answer all prompts together; ``show`` is handed the text of a lone prompt as it comes.

    ``tell`` is handed, after each step of the prompts, how many of their tokens are computed and how many there are.
    """
    answers: dict[RequestId, Answer] = {}
    begun = time.perf_counter()
    for prompt in prompts:
        answers[engine.add_request(prompt, params)] = Answer(len(prompt))
    while any(answer.reason is None for answer in answers.values()):
        for output in engine.step():
            answer = answers[output.request_id]
            answer.add(output, time.perf_counter() - begun)
            answer.cached = output.cached_tokens or answer.cached
            if show is not None and len(prompts) == 1:
                show(output.text)
        if tell is not None and any(not answer.tokens and answer.reason is None for answer in answers.values()):
            tell(*_prefilled(engine, answers))
    return list(answers.values())


def _prefilled(engine: Engine, answers: dict[RequestId, Answer]) -> tuple[int, int]:
    """Tokens of all prompts that are computed, or whose answer has begun, and of all prompts."""
    done = 0
    for request_id, answer in answers.items():
        at = engine.progress(request_id)
        done += answer.prompt_tokens if answer.tokens or at is None else min(at.computed, answer.prompt_tokens)
    return done, sum(answer.prompt_tokens for answer in answers.values())
