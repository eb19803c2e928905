"""What ``kvengine`` prints: the answers, and where their time and their tokens came from."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.text import Text

from kvstore.engine.counters import Counters
from kvstore.tools.kvengine.answers import Answer
from kvstore.tools.output import Printer, columns

SOURCES = ("engine", "device", "host", "ssd")


class Prefill:
    """How far the prompts are, on one line of a terminal's stderr; nothing where nobody watches."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, done: int, total: int) -> None:
        """Write the line anew."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Kprompts: {done:,} of {total:,} tokens")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        """Remove the line, before an answer is written."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def print_answers(printer: Printer, answers: Sequence[Answer], counters: Counters) -> None:
    """Text and table for people, one JSON object for programs."""
    if not printer.for_people:
        printer.json({"answers": [_plain(answer) for answer in answers], "counters": counters.as_dict()})
        return
    if len(answers) == 1:
        # The text itself was shown as it came.
        printer.line()
    else:
        for index, answer in enumerate(answers, 1):
            printer.line(f"--- {index}")
            printer.line(Text(answer.text))
    printer.line()
    titles = ">prompt|>tokens|>computed|" + "|".join(f">{name}" for name in SOURCES) + "|>first s|>tokens/s|~ended by"
    printer.table(columns(titles), [_row(index, answer) for index, answer in enumerate(answers, 1)])
    printer.line()
    printer.facts([(name.replace("_", " "), str(value)) for name, value in counters.as_dict().items() if value])


def _row(index: int, answer: Answer) -> list[str]:
    computed = max(0, answer.prompt_tokens - sum(answer.cached.values()))
    sources = [str(answer.cached.get(name, 0)) for name in SOURCES]
    ended = answer.reason.value if answer.reason is not None else ""
    times = [f"{answer.first_s:.2f}", f"{answer.tokens_per_s:.1f}"]
    return [str(index), str(answer.prompt_tokens), str(computed), *sources, *times, ended]


def _plain(answer: Answer) -> dict[str, object]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "text": answer.text,
        "ended_by": answer.reason.value if answer.reason is not None else "",
        "first_token_s": round(answer.first_s, 4),
        "tokens_per_s": round(answer.tokens_per_s, 2),
        "cached_tokens": {name: answer.cached.get(name, 0) for name in SOURCES},
    }
