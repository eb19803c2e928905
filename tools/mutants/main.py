"""``python -m kvstore.tools.mutants FILE... --tests PATH --count 40 --seed 1``: which small faults no test notices.

Works on a copy of the project, so nothing here changes. The tests run once unbroken, then once a mutant, to the first
failure; one that takes too long counts as found. Exit status 0 if none survives, 1 if some do, 2 for wrong usage.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.core.errors import InvalidArgument
from kvstore.tools.mutants.operators import OPERATORS, Mutant, mutants_of
from kvstore.tools.output import Format, Printer, columns


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant: ``found`` by a failing test or a time-out."""

    mutant: Mutant
    found: bool
    seconds: float


def choose(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """``count`` of them, every operator alike as far as there are enough; the same for the same seed and code."""
    draw, by_operator = random.Random(seed), {name: list[Mutant]() for name in OPERATORS}
    for mutant in mutants:
        by_operator[mutant.name.split(":")[2]].append(mutant)
    for each in by_operator.values():
        draw.shuffle(each)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_operator.values()):
        chosen += [each.pop() for each in by_operator.values() if each]
    return sorted(chosen[:count], key=lambda mutant: mutant.name)


def copy_project(root: Path, target: Path) -> None:
    """Copy what git tracks or would track, and built extensions."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True).stdout.decode().split("\0")
    built = [str(path.relative_to(root)) for path in root.glob("kernels/*.so")]
    for name in {*filter(None, names), *built}:
        source = root / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def passes(project: Path, tests: list[str], timeout_s: float) -> bool:
    """Whether the tests pass in time. Their processes end with them."""
    command = ["timeout", "-k", "5", str(timeout_s), "env", f"PYTHONPATH={project}", "PYTHONDONTWRITEBYTECODE=1"]
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=project, capture_output=True, check=False).returncode == 0


def judge(project: Path, mutants: list[Mutant], tests: list[str], timeout_s: float) -> Iterable[Result]:
    """Run the tests against each mutant in turn; the project is whole again after each."""
    for mutant in mutants:
        path = project / mutant.name.split(":")[0]
        whole, begun = path.read_bytes(), time.perf_counter()
        path.write_bytes(mutant.apply(whole))
        try:
            survived = passes(project, tests, timeout_s)
        finally:
            path.write_bytes(whole)
        yield Result(mutant, not survived, time.perf_counter() - begun)


def gather(root: Path, files: list[str], names: Path | None, count: int, seed: int) -> list[Mutant]:
    """The mutants to run: those named in a file, one a line, or some of all. InvalidArgument names what is unknown."""
    every: list[Mutant] = []
    for file in files:
        if not (root / file).is_file():
            raise InvalidArgument("FILE", repr(file), f"a Python file below {root}")
        every += mutants_of(file, (root / file).read_text(encoding="utf-8"))
    if names is None:
        return choose(every, count, seed)
    wanted = [line for line in names.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    known = {mutant.name: mutant for mutant in every}
    gone = [name for name in wanted if name not in known]
    if gone:
        raise InvalidArgument("--list", gone[0], "the name of a mutant of the files given; the code has changed")
    return [known[name] for name in wanted]


def main(  # noqa: PLR0913, PLR0917  the options of the command
    files: Annotated[list[str], typer.Argument(help="Python files to break, from the root of the project.")],
    tests: Annotated[list[str], typer.Option("--tests", help="What pytest runs; may be given several times.")],
    count: Annotated[int, typer.Option("--count", help="Mutants to try.", min=1)] = 40,
    seed: Annotated[int, typer.Option("--seed", help="Chooses them.")] = 1,
    names: Annotated[Path | None, typer.Option("--list", help="Try those named in this file instead.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for one run of the tests.", min=1)] = 120,
    output: Annotated[Format, typer.Option("--output", "-o", help="How to print the answer.")] = Format.TABLE,
) -> None:
    """Break the code in small ways and list what the tests do not notice."""
    root, printer = Path.cwd(), Printer(output)
    try:
        chosen = gather(root, files, names, count, seed)
    except (InvalidArgument, OSError) as error:
        printer.talk(f"mutants: {error}", style="red")
        raise typer.Exit(2) from error
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:
        project = Path(folder)
        copy_project(root, project)
        if not passes(project, tests, timeout_s):
            printer.talk("mutants: the tests fail on unbroken code, or take longer than --timeout", style="red")
            raise typer.Exit(2)
        results = []
        for number, result in enumerate(judge(project, chosen, tests, timeout_s), 1):
            results.append(result)
            word = "found" if result.found else "SURVIVED"
            printer.talk(f"{number}/{len(chosen)} {word} {result.mutant.name} ({result.seconds:.0f} s)")
    survivors = [result.mutant for result in results if not result.found]
    if printer.for_people:
        printer.table(columns("~Survivor|>Line|~Becomes"), [(m.name, str(m.line), m.text) for m in survivors])
        printer.line(f"{len(results) - len(survivors)} of {len(results)} mutants were found")
    else:
        rows = [{"name": r.mutant.name, "line": r.mutant.line, "found": r.found} for r in results]
        printer.json({"mutants": rows, "survivors": len(survivors)})
    raise typer.Exit(1 if survivors else 0)


def run() -> None:
    """Entry of ``python -m kvstore.tools.mutants``."""
    typer.run(main)
