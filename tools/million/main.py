"""``python -m kvstore.tools.million``: the command, and what it prints."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer
from rich.text import Text

from kvstore.core.errors import KVStoreError
from kvstore.engine.needle import make_needle_model
from kvstore.engine.weights import load_model
from kvstore.tools import text
from kvstore.tools.million.needles import Found, Reached, run
from kvstore.tools.million.plan import Plan
from kvstore.tools.million.plots import draw_needles, draw_steps, fit_steps
from kvstore.tools.output import Format, Printer, columns
from kvstore.tools.progress import Progress

ROOT: Final = Path(__file__).resolve().parents[2]
LENGTHS: Final = "250000,375000,500000,625000,750000,875000,1000000"
STEPS_PICTURE, NEEDLES_PICTURE, FIGURES = "million-steps.png", "million-needles.png", "million.json"


def command(
    lengths: Annotated[
        str, typer.Option("--lengths", help="Contexts in tokens, ascending, apart by commas.")
    ] = LENGTHS,
    device: Annotated[float, typer.Option("--device", help="Share of the longest context on DEVICE.")] = 0.05,
    host: Annotated[float, typer.Option("--host", help="Share of the longest context in HOST.")] = 0.20,
    codec: Annotated[str, typer.Option("--codec", help="Of K and V below DEVICE: raw (fp16) or int8.")] = "raw",
    seed: Annotated[int, typer.Option("--seed", help="Of tokens and needles.", min=0)] = 1,
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures and figures.")] = ROOT
    / "docs"
    / "pictures",
) -> None:
    """Find needles in contexts that DEVICE and HOST hold a quarter of, and draw what each step cost."""
    printer, begun = Printer(Format.TABLE), time.monotonic()
    try:
        plan = Plan(_numbers(lengths), device, host, seed)
        with Progress() as progress:
            found = _run(plan, codec, progress)
    except KVStoreError as error:
        printer.talk(f"million: {error.message}", style="red")
        raise typer.Exit(1) from error
    out.mkdir(parents=True, exist_ok=True)
    draw_steps(found, out / STEPS_PICTURE)
    draw_needles(found, out / NEEDLES_PICTURE)
    (out / FIGURES).write_text(json.dumps(_plain(found, plan, codec), indent=1) + "\n", encoding="utf-8")
    good = _show(printer, found)
    printer.talk(f"took {text.duration(time.monotonic() - begun)}; pictures and figures are in {out}", style="dim")
    raise typer.Exit(0 if good else 1)


def _run(plan: Plan, codec: str, progress: Progress) -> Found:
    data = ROOT / ".cache" / "million"
    data.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=data) as folder:
        with progress.step("making the needle model"):
            make_needle_model(Path(folder) / "model", seed=1)
            model = load_model(Path(folder) / "model", codec=codec)
        with progress.step(f"prefill and needles, up to {plan.longest:,} tokens"):
            return run(model, plan, Path(folder), progress.say)


def _show(printer: Printer, found: Found) -> bool:
    """Print the table; True if every needle was answered."""
    heads = "~Context|>Needles|>Prefill|>Tokens/s|>Step|>Fastest|>DEVICE|>HOST|>SSD|>Of the disk"
    printer.line(Text("Exact attention; bytes that one decode step reads, by tier", style="bold"))
    printer.table(columns(heads), [_row(reached, found) for reached in found.reached])
    fit = fit_steps(found)
    if fit is not None:
        printer.line(
            f"The fastest steps take {fit.base:.3f} s and {fit.slope * 1e9:.0f} ns a token (r2 = {fit.r2:.4f})."
        )
    printer.line(f"The disk reads {found.disk_bytes_per_s / 1e9:.2f} GB/s (O_DIRECT, 4 MiB, depth 8, in this run).")
    memory = found.memory
    printer.line(
        f"Engine and daemon took {text.size(memory.peak)} at their peak: {text.size(memory.code)} of code and "
        f"prompts, and {memory.share:.2f} times the {text.size(memory.told)} of DEVICE, HOST, buffer and weights."
    )
    right = sum(reached.right for reached in found.reached)
    asked = sum(len(reached.answers) for reached in found.reached)
    printer.line(Text(f"{right} of {asked} needles were answered.", style="green" if right == asked else "bold red"))
    return right == asked


def _row(reached: Reached, found: Found) -> list[str | Text]:
    read = {name: median(step.nbytes[name] for step in reached.steps) for name in ("device", "host", "ssd")}
    share = read["ssd"] / reached.fastest_s / found.disk_bytes_per_s
    return [
        f"{reached.length:,}",
        f"{reached.right}/{len(reached.answers)}",
        text.duration(reached.prefill_s),
        f"{reached.computed / reached.prefill_s:,.0f}" if reached.prefill_s else "",
        f"{reached.step_s:.3f} s",
        f"{reached.fastest_s:.3f} s",
        *(text.size(int(read[name])) for name in ("device", "host", "ssd")),
        f"{share:.0%}",
    ]


def _plain(found: Found, plan: Plan, codec: str) -> dict[str, object]:
    fit = fit_steps(found)
    return {
        "codec": codec,
        "device_share": plan.device_share,
        "host_share": plan.host_share,
        "disk_bytes_per_s": round(found.disk_bytes_per_s),
        "memory": asdict(found.memory),
        "fit": None if fit is None else {"base_s": fit.base, "s_per_token": fit.slope, "r2": fit.r2},
        "lengths": [
            {
                "tokens": reached.length,
                "computed": reached.computed,
                "prefill_s": round(reached.prefill_s, 3),
                "steps_s": [round(step.seconds, 4) for step in reached.steps],
                "peak_bytes": reached.peak_bytes,
                "waited_s": [round(step.waited_s, 4) for step in reached.steps],
                "step_bytes": reached.steps[-1].nbytes if reached.steps else {},
                "answers": [
                    {"depth": round(depth, 4), "answer": answer, "wanted": wanted}
                    for depth, answer, wanted in reached.answers
                ],
            }
            for reached in found.reached
        ],
    }


def _numbers(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{words!r} is no list of numbers", param_hint="--lengths") from error


def main() -> None:
    """Entry point."""
    typer.run(command)


if __name__ == "__main__":
    main()
