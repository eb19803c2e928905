"""``kvbench``: the benches by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, NoReturn, TypeVar

import typer

from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.markdown import section, write_section
from kvstore.tools.kvbench.report import Report, print_report, report_section
from kvstore.tools.kvbench.rows import Row, print_rows
from kvstore.tools.output import Format, Printer

HOST_BYTES: Final = 640 << 20
PICTURES: Final = (".png", ".svg")

FAILED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
CODES: Final = {"INVALID_ARGUMENT": USAGE, "UNAVAILABLE": UNREACHABLE}

THREADS_MAX: Final = 1024
NUMBER_MAX: Final = 1 << 31

OutputOption = Annotated[Format, typer.Option("--output", "-o", help="table, or json: a list of rows.")]
SocketOption = Annotated[str, typer.Option("--socket", "-s", help="Use this daemon; else one is started.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Few rounds: shows that it works, not how fast it is.")]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", help="Also write the tables into this document, between their marks.")
]
ThreadsOption = Annotated[str, typer.Option("--threads", help="Thread counts, apart by commas.")]

T = TypeVar("T")

app = typer.Typer(
    help="Measure, and print the limit of this machine beside each figure, measured in the same run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def store(
    socket: SocketOption = "",
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """Same-host get, put, calls and matches against a daemon."""
    from kvstore.tools.kvbench.store import Effort, run_store  # noqa: PLC0415 - brings numpy, which --help needs not

    effort = Effort(rounds=5, calls=60) if quick else Effort()
    _run(output, markdown, lambda printer: _on_daemon(socket, printer, lambda where: run_store(where, effort)))


@app.command()
def crowd(
    socket: SocketOption = "",
    clients: Annotated[
        str, typer.Option("--clients", help="Numbers of clients, apart by commas.")
    ] = "1,2,8,32,128,200",
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw them into this file, .png or .svg.")] = None,
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """Put and get of four blocks by more and more clients at a time: whether one costs the others."""
    from kvstore.tools.kvbench.crowd import CLIENTS_MAX, Effort, run_crowd  # noqa: PLC0415 - brings numpy
    from kvstore.tools.kvbench.crowd_report import report  # noqa: PLC0415

    counts = tuple(sorted(set(_numbers(clients, "--clients"))))
    if sum(counts) > CLIENTS_MAX:
        raise typer.BadParameter(f"{clients!r} is more than {CLIENTS_MAX} clients in sum", param_hint="--clients")
    effort = Effort(1, 0.3, counts[:2]) if quick else Effort(counts=counts)

    def work(printer: Printer) -> Report:
        if plot is not None:
            _require_picture(plot)
        found = _on_daemon(socket, printer, lambda where: run_crowd(where, effort))
        if plot is not None:
            from kvstore.tools.kvbench.crowd_plot import draw_crowd  # noqa: PLC0415 - brings matplotlib

            draw_crowd(found, plot)
        return report(found)

    _run(output, markdown, work)


@app.command()
def disk(
    directory: Annotated[str, typer.Option("--directory", "-d", help="Measure on the disk of this folder.")] = ".",
    depth: Annotated[int, typer.Option("--depth", help="Runs under way at once.", min=1, max=64)] = 8,
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """The SSD tier beside raw direct I/O; matches while the disk is saturated."""
    from kvstore.tools.kvbench.disk import Effort, run_disk  # noqa: PLC0415

    effort = Effort(rounds=2, total_bytes=32 << 20, depth=depth, calls=60) if quick else Effort(depth=depth)
    _run(output, markdown, lambda _: run_disk(Path(directory), effort))


@app.command()
def attention(
    threads: ThreadsOption = "1,2",
    long: Annotated[
        bool, typer.Option("--long/--short", help="Also a context of 1,048,576 tokens, where 8 GiB are free.")
    ] = True,
    level: Annotated[
        str, typer.Option("--level", help="Instruction set: avx512, avx2 or portable; else the best.")
    ] = "",
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """Decode attention over paged blocks, beside the time that reading the same bytes takes."""
    from kvstore.tools.kvbench.kernels import run_attention  # noqa: PLC0415 - brings torch

    repeats = 1 if quick else 7
    _run(output, markdown, lambda _: run_attention(_numbers(threads), long=long, repeats=repeats, level=level))


@app.command()
def codec(
    threads: ThreadsOption = "1,2",
    text: Annotated[
        Path | None, typer.Option("--text", help="Also code K and V of this text losslessly, for SSD and the wire.")
    ] = None,
    model: Annotated[Path, typer.Option("--model", help="Folder of the model for --text.")] = Path(
        ".cache/models/smollm2"
    ),
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """Quantise, dequantise and the checksummed copy, beside what memory allows."""
    from kvstore.tools.kvbench.kernels import run_codec  # noqa: PLC0415 - brings torch

    def work(printer: Printer) -> list[Row]:
        rows = run_codec(_numbers(threads), repeats=1 if quick else 9)
        if text is not None:
            from kvstore.tools.kvbench.lossless import run_lossless  # noqa: PLC0415 - brings transformers

            with TemporaryDirectory(prefix="kvbench-") as folder:
                printer.talk("starting kvstored with 256 MiB of HOST, for clients over TCP", style="dim")
                flags = {"host": "256 MiB", "device": "0", "listen": "127.0.0.1:0"}
                with DaemonProcess(Path(folder), flags) as daemon:
                    daemon.start()
                    rows += run_lossless(model, text, daemon, rounds=2 if quick else 15)
        return rows

    _run(output, markdown, work)


@app.command()
def plan(
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Measure on the disk of this folder.")] = Path(),
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of a context.", min=64, max=1 << 20)] = 4096,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the model.", min=1, max=256)] = 12,
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """Reading plans from SSD beside raw direct I/O, and the processor time of their control."""
    from kvstore.tools.kvbench.plan import Effort, run_plan  # noqa: PLC0415 - brings numpy

    effort = Effort(256, 4, 2, 0.2) if quick else Effort(blocks, layers)
    _run(output, markdown, lambda _: run_plan(directory, effort))


@app.command()
def restart(
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Fill a folder on this disk.")] = Path(),
    blocks: Annotated[str, typer.Option("--blocks", help="Numbers of blocks, apart by commas.")] = "250000,1000000",
    run: Annotated[int, typer.Option("--run", help="Blocks written at a time, of chains of 64.", min=1, max=64)] = 64,
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """How long a store with many blocks on SSD takes to be warm after a kill, and the memory of its index."""
    from kvstore.tools.kvbench.restart import run_restart  # noqa: PLC0415

    counts = (10_000,) if quick else _numbers(blocks, "--blocks")
    _run(output, markdown, lambda _: run_restart(directory, counts, run))


@app.command()
def quality(
    text: Annotated[list[Path], typer.Argument(help="Texts to predict, UTF-8.")],
    model: Annotated[Path, typer.Option("--model", help="Folder of a model.")] = Path(".cache/models/smollm2"),
    tokens: Annotated[int, typer.Option("--tokens", help="Take the first tokens of each text.", min=128)] = 4096,
    codec: Annotated[
        list[str] | None,
        typer.Option("--codec", help="Only this one; may be given several times. All are measured else."),
    ] = None,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """What each codec costs: KL, argmax, perplexity, attention error, on a text of yours."""
    from kvstore.tools.kvbench.quality import run_quality  # noqa: PLC0415 - brings torch and transformers

    _run(output, markdown, lambda _: run_quality(model, text, tokens, codec or ()))


@app.command()
def capacity(
    host_mib: Annotated[int, typer.Option("--host-mib", help="Memory of HOST.", min=32)] = 256,
    quick: QuickOption = False,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """How many tokens the same bytes of HOST hold, raw and under int8, as kvctl status counts them."""
    from kvstore.tools.kvbench.capacity import run_capacity  # noqa: PLC0415 - brings numpy

    _run(output, markdown, lambda _: run_capacity(64 if quick else host_mib))


@app.command()
def greedy(
    text: Annotated[
        list[Path] | None, typer.Argument(help="Texts that prompts are cut from, UTF-8; else Python's own library.")
    ] = None,
    model: Annotated[Path, typer.Option("--model", help="Folder of a model.")] = Path(".cache/models/smollm2"),
    prompts: Annotated[int, typer.Option("--prompts", help="Number of prompts.", min=2)] = 20,
    answer: Annotated[int, typer.Option("--answer", help="Tokens of each answer.", min=1)] = 64,
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """How often greedy tokens over int8 in HOST and on SSD are those over fp16, in the engine, on real prompts."""
    from kvstore.tools.kvbench.greedy import Job, run_greedy  # noqa: PLC0415 - brings torch and transformers

    _run(output, markdown, lambda _: run_greedy(Job(model, tuple(text or ()), prompts, answer)))


@app.command()
def million(
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the context.", min=4096)] = 1_000_000,
    share: Annotated[float, typer.Option("--share", help="Most blocks that selected attention reads.")] = 0.05,
    model: Annotated[Path, typer.Option("--model", help="Folder of a model.")] = Path(".cache/models/smollm2"),
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Fill a folder on this disk.")] = Path(),
    output: OutputOption = Format.TABLE,
    markdown: MarkdownOption = None,
) -> None:
    """Decode steps over a context that lies on SSD: 12 GB of int8 at a million tokens of SmolLM2."""
    from kvstore.tools.kvbench.million import Effort, run_million  # noqa: PLC0415 - brings torch and transformers

    _run(output, markdown, lambda _: run_million(directory, model, Effort(tokens, max_share=share)))


def _on_daemon(socket: str, printer: Printer, work: Callable[[str], T]) -> T:
    """Measure on the daemon that was named, else on one of its own."""
    if socket:
        return work(socket)
    flags = {"host": str(HOST_BYTES), "device": "0"}
    with TemporaryDirectory(prefix="kvbench-") as folder, DaemonProcess(Path(folder), flags) as daemon:
        printer.talk("starting kvstored with 640 MiB of HOST, without DEVICE and SSD", style="dim")
        daemon.start()
        return work(str(daemon.socket))


def _require_picture(path: Path) -> None:
    """Raises InvalidArgument where no picture can be drawn, or none into this file."""
    if path.suffix not in PICTURES or not path.parent.is_dir():
        raise InvalidArgument("--plot", str(path), f"a file in a folder that is there, {' or '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise InvalidArgument("--plot", str(path), "matplotlib: pip install '.[pictures]'")


def _numbers(text: str, option: str = "--threads") -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > (THREADS_MAX if option == "--threads" else NUMBER_MAX):
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,2", param_hint=option)
    return found


def _run(output: Format, markdown: Path | None, work: Callable[[Printer], list[Row] | Report]) -> None:
    printer = Printer(output)
    try:
        found = work(printer)
    except KVStoreError as error:
        printer.talk(f"kvbench: {error.message}", style="red")
        sys.exit(CODES.get(error.status, FAILED))
    except OSError as error:
        _refuse_path(printer, error)
    except KeyboardInterrupt:
        printer.talk("kvbench: interrupted")
        sys.exit(INTERRUPTED)
    if isinstance(found, Report):
        print_report(printer, found)
        bench, written = found.rows[0].bench, report_section(found)
    else:
        print_rows(printer, found)
        bench, written = found[0].bench, section(found)
    if markdown is not None:
        try:
            write_section(markdown, bench, written)
        except OSError as error:
            _refuse_path(printer, error)


def _refuse_path(printer: Printer, error: OSError) -> NoReturn:
    """What the system says of a folder or a file that was given."""
    where = "" if error.filename is None else f"{str(error.filename)[:200]!r}: "
    printer.talk(f"kvbench: {where}{error.strerror or error}", style="red")
    sys.exit(USAGE)


def main() -> None:
    """Entry point of the command."""
    app(prog_name="kvbench")
