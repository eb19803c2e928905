"""``kvbench``: the benches by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from kvstore.core.errors import KVStoreError
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.rows import Row, print_rows
from kvstore.tools.output import Format, Printer

HOST_BYTES: Final = 640 << 20

OutputOption = Annotated[Format, typer.Option("--output", "-o", help="table, or json: a list of rows.")]
SocketOption = Annotated[str, typer.Option("--socket", "-s", help="Use this daemon; else one is started.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Few rounds: shows that it works, not how fast it is.")]

app = typer.Typer(
    help="Measure, and print the limit of this machine beside each figure, measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def store(socket: SocketOption = "", quick: QuickOption = False, output: OutputOption = Format.TABLE) -> None:
    """Same-host get, put, calls and matches against a daemon."""
    from kvstore.tools.kvbench.store import Effort, run_store  # noqa: PLC0415 - brings numpy, which --help needs not

    effort = Effort(rounds=5, calls=60) if quick else Effort()

    def work(printer: Printer) -> list[Row]:
        with ExitStack() as stack:
            where = socket
            if not where:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvbench-")))
                daemon = stack.enter_context(DaemonProcess(folder, {"host": str(HOST_BYTES), "device": "0"}))
                printer.talk("starting kvstored with 640 MiB of HOST, without DEVICE and SSD", style="dim")
                daemon.start()
                where = str(daemon.socket)
            return run_store(where, effort)

    _run(output, work)


@app.command()
def disk(
    directory: Annotated[str, typer.Option("--directory", "-d", help="Measure on the disk of this folder.")] = ".",
    depth: Annotated[int, typer.Option("--depth", help="Runs under way at once.", min=1, max=64)] = 8,
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """The SSD tier beside raw direct I/O; matches while the disk is saturated."""
    from kvstore.tools.kvbench.disk import Effort, run_disk  # noqa: PLC0415

    effort = Effort(rounds=2, total_bytes=32 << 20, depth=depth, calls=60) if quick else Effort(depth=depth)
    _run(output, lambda _: run_disk(Path(directory), effort))


def _run(output: Format, work: Callable[[Printer], list[Row]]) -> None:
    printer = Printer(output)
    try:
        print_rows(printer, work(printer))
    except KVStoreError as error:
        printer.talk(f"kvbench: {error.message}", style="red")
        sys.exit(1)


def main() -> None:
    """Entry point of the command."""
    app(prog_name="kvbench")
