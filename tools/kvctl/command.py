"""What every command shares: the options that all take, the way to the daemon, and errors as exit codes."""

from __future__ import annotations

import inspect
import json
import os
import sys
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Final, Protocol, Self, TypeVar

import typer
from google.protobuf.message import Message

from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.tools.kvctl.exits import BY_STATUS, Exit
from kvstore.tools.output import Format, Printer

Reply = TypeVar("Reply", bound=Message)


class Port(Protocol):
    """The daemon as commands see it: one call, one answer, errors of ``kvstore.core.errors``."""

    def call(self, method: str, request: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Call ``kvstore.v1.<method>``, such as ``Admin/Status``, and wait ``timeout`` seconds at most."""

    def close(self) -> None:
        """End the session."""


Connect = Callable[[str, float], Port]


@dataclass(slots=True)
class Call(AbstractContextManager["Call"]):
    """One run of a command: its printer and, from the first question on, its session with the daemon."""

    printer: Printer
    socket: str
    timeout: float
    connect: Connect
    _port: Port | None = field(default=None, init=False)

    def ask(self, method: str, request: Message, reply_class: type[Reply]) -> Reply:
        """Call the daemon. Raises what it answers, Unavailable where nobody does."""
        if self._port is None:
            self._port = self.connect(self.socket, self.timeout)
        return self._port.call(method, request, reply_class, self.timeout)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._port is not None:
            self._port.close()

    def __enter__(self) -> Self:
        return self


Function = Callable[..., Exit]

PATH_SHOWN: Final = 200
"""Characters of a path in a message; a longer one is wrong because it is long."""

_PANEL: Final = "Options of every command"
TIMEOUT_MAX_S: Final = 1_000_000
"""Eleven days: more milliseconds than a request can say are no time to wait either."""

SocketOption = Annotated[
    str,
    typer.Option(
        "--socket",
        "-s",
        help="The daemon's session socket.",
        envvar="KVSTORE_SOCKET",
        rich_help_panel=_PANEL,
        show_default=True,
    ),
]
OutputOption = Annotated[
    Format, typer.Option("--output", "-o", help="How to print the answer.", rich_help_panel=_PANEL)
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        "-t",
        help="Seconds to wait for an answer.",
        min=0.001,
        max=TIMEOUT_MAX_S,
        rich_help_panel=_PANEL,
    ),
]


def as_command(function: Function, connect: Connect, default_socket: str) -> Callable[..., None]:
    """``function(call, ...) -> Exit`` as a typer command that also takes the common options."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(function).parameters.values())[1:]]
    defaults = getattr(function, "timeout_seconds", 10.0)
    common = [
        inspect.Parameter("socket", inspect.Parameter.KEYWORD_ONLY, default=default_socket, annotation=SocketOption),
        inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=Format.TABLE, annotation=OutputOption),
        inspect.Parameter("timeout", inspect.Parameter.KEYWORD_ONLY, default=defaults, annotation=TimeoutOption),
    ]

    def run(**values: object) -> None:
        socket, timeout = str(values.pop("socket")), float(typing.cast(float, values.pop("timeout")))
        printer = Printer(Format(str(values.pop("output"))))
        with Call(printer, socket, timeout, connect) as call:
            code = guarded(printer, lambda: function(call, **values))
        raise typer.Exit(int(code))

    parameters = [*[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own], *common]
    run.__doc__ = function.__doc__
    run.__name__ = function.__name__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def slow(seconds: float) -> Callable[[Function], Function]:
    """Marks a command whose answer may take longer than the common deadline: its default for ``--timeout``."""

    def mark(function: Function) -> Function:
        function.timeout_seconds = seconds  # type: ignore[attr-defined]
        return function

    return mark


def guarded(printer: Printer, work: Callable[[], Exit]) -> Exit:
    """Run ``work``; an error becomes one message on stderr and its exit code."""
    try:
        return work()
    except KVStoreError as error:
        tell(printer, error)
        return BY_STATUS.get(error.status, Exit.FAILED)
    except KeyboardInterrupt:
        printer.talk("kvctl: interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe, such as head, has read enough: that is no error, and nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except OSError as error:
        # Whatever the system says of a path that was given: too long, not to be read, on a disk that fails.
        where = "" if error.filename is None else f"{str(error.filename)[:PATH_SHOWN]!r}: "
        printer.talk(f"kvctl: {where}{error.strerror or error}", style="red")
        return Exit.USAGE


def tell(printer: Printer, error: KVStoreError) -> None:
    """An error as a sentence, or as one line of JSON, on stderr."""
    if printer.for_people:
        printer.talk(f"kvctl: {error.message}", style="red")
        return
    detail = {"reason": error.reason, "message": error.message, "field": error.field}
    detail |= {"value": error.value, "expected": error.expected}
    sys.stderr.write(json.dumps({"error": detail}) + "\n")


def need(condition: bool, option: str, value: object, expected: str) -> None:
    """Raise InvalidArgument about an option unless ``condition`` holds."""
    if not condition:
        raise InvalidArgument(option, value, expected)
