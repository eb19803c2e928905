"""``make million`` at lengths that a test can wait for: the real model, a real daemon, the real pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvstore.core.errors import InvalidArgument
from kvstore.engine.needle import START
from kvstore.tools.million.main import command
from kvstore.tools.million.needles import Found, Reached, Step
from kvstore.tools.million.plan import Plan
from kvstore.tools.million.plots import fit_steps


def test_each_length_is_the_beginning_of_the_next_and_has_its_own_needles() -> None:
    haystacks = Plan((2000, 4000, 8000)).haystacks()
    longest = haystacks[8000].tokens
    for length, haystack in haystacks.items():
        assert haystack.tokens == longest[:length]
        assert (haystack.tokens[0], len(haystack.answers)) == (START, 10)
        for key, value in haystack.answers.items():
            assert haystack.tokens[haystack.tokens.index(key) + 1] == value
    assert haystacks[2000].tokens[1998] in haystacks[2000].answers


@pytest.mark.parametrize("lengths", [(), (10,), (4000, 2000), (4000, 4000)])
def test_lengths_that_are_no_plan_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        Plan(lengths)


def test_the_fit_is_a_line_and_says_how_well_it_fits() -> None:
    def reached(length: int, *seconds: float) -> Reached:
        return Reached(length, steps=[Step(value, {}, 0.0) for value in seconds])

    exact = fit_steps(Found([reached(1000, 0.3, 0.8), reached(2000, 0.5), reached(4000, 2.0, 0.9)], 1e9))
    assert exact is not None
    assert (round(exact.base, 6), round(exact.slope, 9), round(exact.r2, 6)) == (0.1, 0.0002, 1.0)
    loose = fit_steps(Found([reached(1000, 0.3), reached(2000, 0.1), reached(3000, 0.3)], 1e9))
    assert loose is not None
    assert loose.r2 < 0.1
    assert fit_steps(Found([reached(1000, 0.3, 0.9)], 1e9)) is None


def test_the_command_finds_all_needles_with_most_of_the_context_on_ssd(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, ["--lengths", "4000,12000", "--codec", "int8", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "20 of 20 needles were answered." in done.output
    for name in ("million-steps.png", "million-needles.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "million.json").read_text())
    last = found["lengths"][-1]
    assert all(answer["answer"] == answer["wanted"] for answer in last["answers"])
    # 188 blocks: at most 9 are on DEVICE and 37 in HOST; int8 slices of one layer are read.
    assert last["step_bytes"]["ssd"] >= 130 * (2 * 64 * 128 + 2 * (2 * 128 + 64))
    assert last["step_bytes"]["private"] == 0
