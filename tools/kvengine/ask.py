"""``kvengine MODEL``: answers prompts and prints them."""

from __future__ import annotations

import sys

from kvstore.core.errors import InvalidArgument
from kvstore.engine.sequence import FinishReason
from kvstore.engine.weights import Model
from kvstore.tools.kvengine.answers import Answer, Show, serve
from kvstore.tools.kvengine.opening import OK, STARVED, ended, opened_engine
from kvstore.tools.kvengine.options import Options
from kvstore.tools.kvengine.report import Prefill, print_answers
from kvstore.tools.output import Printer


def run(options: Options) -> int:
    """Load, answer, print; returns the exit code."""
    printer = Printer(options.output)
    return ended(lambda: _run(options, printer), printer)


def _run(options: Options, printer: Printer) -> int:
    with opened_engine(options.engine, printer) as (engine, model):
        prefill = Prefill()
        answers = serve(engine, _prompts(model, options), options.sampling, _stream_of(printer, prefill), prefill.show)
        prefill.clear()
        print_answers(printer, answers, engine.counters)
    return STARVED if any(_starved(answer) for answer in answers) else OK


def _prompts(model: Model, options: Options) -> list[list[int]]:
    if model.text is None:
        raise InvalidArgument("model", str(options.engine.model), "a folder with tokenizer.json, to run text")
    if options.chat:
        return [model.text.chat([{"role": "user", "content": prompt}]) for prompt in options.prompts]
    return [model.text.encode(prompt) for prompt in options.prompts]


def _stream_of(printer: Printer, prefill: Prefill) -> Show | None:
    if not printer.for_people:
        return None

    def show(text: str) -> None:
        prefill.clear()
        sys.stdout.write(text)
        sys.stdout.flush()

    return show


def _starved(answer: Answer) -> bool:
    return answer.reason in (FinishReason.MEMORY, FinishReason.CACHE)
