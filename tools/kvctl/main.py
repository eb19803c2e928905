"""``kvctl``: the commands by name, and nothing else. Each has a file of its own beside this one."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kvstore import __version__
from kvstore.rpc.paths import default_socket
from kvstore.tools.kvctl import (
    compact,
    doctor,
    drain,
    du,
    evict,
    leases,
    ls,
    match,
    pin,
    quarantine,
    show,
    status,
    unpin,
    verify,
    why,
)
from kvstore.tools.kvctl.command import Connect, Function, as_command
from kvstore.tools.kvctl.connect import connect_daemon

COMMANDS: Final[dict[str, dict[str, Function]]] = {
    "Look": {
        "status": status.status,
        "ls": ls.ls,
        "show": show.show,
        "match": match.match,
        "why": why.why,
        "leases": leases.leases,
        "du": du.du,
        "doctor": doctor.doctor,
    },
    "Change": {
        "evict": evict.evict,
        "pin": pin.pin,
        "unpin": unpin.unpin,
        "drain": drain.drain,
        "compact": compact.compact,
    },
    "Check": {"verify": verify.verify, "quarantine": quarantine.quarantine},
}
"""Panels of the help, and in each the commands by name."""

EPILOG: Final = (
    "Exit codes: 0 yes, 1 no or something bad found, 2 usage, 3 no daemon answers, 4 refused, 5 not found, "
    "6 too late, 7 the daemon failed."
)


def make_app(connect: Connect, default_socket: str) -> typer.Typer:
    """The command line over a way to the daemon."""
    app = typer.Typer(
        help="Ask and steer kvstored, the KV-cache memory service of this node.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for panel, commands in COMMANDS.items():
        for name, function in commands.items():
            app.command(name, rich_help_panel=panel)(as_command(function, connect, default_socket))
    return app


def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the command."""
    make_app(connect_daemon, str(default_socket()))(prog_name="kvctl")
