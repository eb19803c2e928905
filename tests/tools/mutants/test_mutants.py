"""The tool that breaks code: what each way to break it makes, and that it finds what no test holds."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tools.mutants.main import choose
from kvstore.tools.mutants.operators import OPERATORS, mutants_of

ROOT = Path(__file__).resolve().parents[3]
CASES = {
    "drop-call": ("def f(x):\n    x.release(1,\n        2)\n    return 1\n", "def f(x):\n    pass\n    return 1\n"),
    "drop-lock": (
        "with self._lock:\n    x = 1\n",
        'with __import__("contextlib").nullcontext():\n    x = 1\n',
    ),
    "drop-finally": (
        "try:\n    f = 1\nfinally:\n    a = 'ä'\n    b = 2\n",
        "try:\n    f = 1\nfinally:\n    pass\n",
    ),
    "swap-arguments": ("x = 'ö', f(a, b, c)\n", "x = 'ö', f(b, a, c)\n"),
    "off-by-one": ("x = a[1:]\n", "x = a[2:]\n"),
    "turn-comparison": ("x = a < b\n", "x = (a <= b)\n"),
    "negate": ("if a and b:\n    x = 1\n", "if not (a and b):\n    x = 1\n"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator(operator: str) -> None:
    before, after = CASES[operator]
    (mutant,) = [m for m in mutants_of("a.py", before) if f":{operator}:" in m.name]
    assert mutant.apply(before.encode()).decode() == after


def test_words_of_a_log_are_left_alone() -> None:
    assert mutants_of("a.py", 'def f():\n    LOG.info("x %s", 1 + 2)\n') == []


def test_names_stay_where_lines_move() -> None:
    text = "def f():\n    return a < 1\nclass C:\n    def g(self):\n        self.close()\n"
    names = [mutant.name for mutant in mutants_of("a.py", text)]
    assert "a.py:C.g:drop-call:1" in names
    assert [mutant.name for mutant in mutants_of("a.py", f"# a line\n\n{text}")] == names


@pytest.mark.parametrize("path", ["engine/needle.py", "engine/sealing.py", "kvstore/core/namespace.py"])
def test_mutants_of_real_files_are_programs_and_differ(path: str) -> None:
    source = (ROOT / path).read_text()
    found = mutants_of(path, source)
    made = {mutant.apply(source.encode()) for mutant in found}
    assert len(found) == len(made) == len({mutant.name for mutant in found})
    for text in made:
        ast.parse(text)


def test_a_seed_chooses_and_every_way_has_its_share() -> None:
    found = mutants_of("engine/sealing.py", (ROOT / "engine/sealing.py").read_text())
    first = choose(found, 12, seed=1)
    assert first == choose(found, 12, seed=1) != choose(found, 12, seed=2)
    assert len({mutant.name.split(":")[2] for mutant in first}) >= 4
    assert len(choose(found, 10_000, seed=1)) == len(found)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text("def low(a):\n    return a < 3\n\n\ndef high(a):\n    return a > 9\n")
    (tmp_path / "test_sums.py").write_text(
        "from sums import low\n\n\ndef test_low():\n    assert low(2) and not low(3)\n"
    )
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def run(project: Path, *words: str) -> tuple[int, str, str]:
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "kvstore.tools.mutants", *words]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_what_no_test_holds_is_listed(project: Path) -> None:
    before = (project / "sums.py").read_text()
    code, out, _ = run(project, "sums.py", "--tests", "test_sums.py", "-o", "json")
    found = {row["name"]: row["found"] for row in json.loads(out)["mutants"]}
    assert code == 1
    assert {
        name.split(":")[1]: {f for n, f in found.items() if n.split(":")[1] == name.split(":")[1]} for name in found
    } == {
        "low": {True},
        "high": {False},
    }
    assert (project / "sums.py").read_text() == before


def test_a_list_is_run_as_it_is_and_a_name_that_is_gone_is_said(project: Path) -> None:
    (project / "list").write_text("# held\nsums.py:low:off-by-one:1\n")
    code, out, _ = run(project, "sums.py", "--tests", "test_sums.py", "--list", "list")
    assert (code, out) == (0, "1 of 1 mutants were found\n")
    (project / "list").write_text("sums.py:gone:negate:1\n")
    code, _, err = run(project, "sums.py", "--tests", "test_sums.py", "--list", "list")
    assert (code, "sums.py:gone:negate:1" in err, "Traceback" in err) == (2, True, False)


def test_tests_that_fail_unbroken_are_said(project: Path) -> None:
    (project / "test_sums.py").write_text("def test_it():\n    assert False\n")
    code, _, err = run(project, "sums.py", "--tests", "test_sums.py")
    assert (code, "unbroken" in err) == (2, True)
