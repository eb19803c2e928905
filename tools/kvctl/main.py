"""``kvctl``: the commands by name, and nothing else. Each has a file of its own beside this one."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Final, cast

import typer

from kvstore import __version__
from kvstore.tools.kvctl.command import Connect, Function, Port, as_command
from kvstore.tools.kvctl.exits import Exit
from kvstore.wire.paths import default_socket

COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "Look": ("status", "top", "ls", "tree", "show", "explain", "match", "why", "leases", "du", "size", "doctor"),
    "Change": ("evict", "pin", "unpin", "warm", "forget", "drain", "compact"),
    "Move": ("export", "import"),
    "Check": ("verify", "quarantine", "trace"),
}
"""Panels of the help, and in each the commands: a module and a function in it of the same name."""

EPILOG: Final = (
    "Exit codes: 0 yes, 1 no or something bad found, 2 usage, 3 no daemon answers, 4 refused, 5 not found, "
    "6 too late, 7 the daemon failed."
)


def make_app(connect: Connect, default_socket: str, names: Iterable[str] | None = None) -> typer.Typer:
    """The command line over a way to the daemon, with all commands or only those named."""
    app = typer.Typer(
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=names is None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    wanted = None if names is None else set(names)
    for panel, commands in COMMANDS.items():
        for name in commands:
            if wanted is None or name in wanted:
                command = as_command(_function(name), connect, default_socket)
                app.command(name, rich_help_panel=panel)(command)
    return app


def _function(name: str) -> Function:
    # A word of Python's own can name neither a function nor a module that others import.
    word = f"{name}_" if keyword.iskeyword(name) else name
    return cast(Function, getattr(import_module(f"kvstore.tools.kvctl.{word}"), word))


def commands_of(words: Sequence[str]) -> set[str] | None:
    """Commands that a command line can mean; None where all must be known, as for help and for a wrong name.

    Loading one command instead of all makes a start faster by a third.
    """
    first = next((word for word in words if not word.startswith("-")), "")
    return {first} if any(first in panel for panel in COMMANDS.values()) else None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Ask and steer kvstored, the KV-cache memory service of this node."""


def _connect(path: str, timeout: float) -> Port:
    """The way to the daemon, loaded when it is gone: the help starts faster by a quarter without it."""
    return cast(Port, import_module("kvstore.tools.kvctl.connect").connect_daemon(path, timeout))


def main() -> None:
    """Entry point of the command."""
    try:
        make_app(_connect, str(default_socket()), commands_of(sys.argv[1:]))(prog_name="kvctl")
    except KeyboardInterrupt:
        # Before or after the command itself, which says so.
        sys.exit(Exit.INTERRUPTED)
