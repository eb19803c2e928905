"""Steps of a long command, shown while they run: a spinner on a terminal, a line a step elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.text import Text

from kvstore.tools import text

if TYPE_CHECKING:
    from rich.status import Status


class Progress(AbstractContextManager["Progress"]):
    """Shows one step at a time."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._status: Status | None = None
        self._doing = ""

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Show ``doing`` while the ``with`` lasts, and how long it took afterwards."""
        self._doing = doing
        begin = time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(doing)
            self._status.start()
        else:
            self._console.print(f"... {doing}")
        try:
            yield
        finally:
            self._end()
        took = text.duration(time.monotonic() - begin)
        self._console.print(Text.assemble(("ok  ", "green"), doing, (f"  {took}", "dim")))

    def report(self, doing: str, done: int, total: int) -> None:
        """Progress inside a step, such as bytes of a download; ``total`` 0 where it is not known."""
        if self._status is not None:
            share = f" {done / total:.0%}" if total else ""
            self._status.update(f"{self._doing}: {doing}{share}")

    def say(self, sentence: str) -> None:
        """A line between steps."""
        self._console.print(Text(f"    {sentence}", style="dim"))

    def _end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
