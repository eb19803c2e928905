"""Parts of the demo that need no model: which text is asked about, and that it says when something is wrong."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvstore.core.errors import Unavailable
from kvstore.engine.reference import common_start
from kvstore.tools.demo import QUESTIONS, Asked, long_text, show
from kvstore.tools.kvengine.answers import Answer
from kvstore.tools.output import Format, Printer
from kvstore.tools.progress import Progress


def asked(when, source, cached, tokens):
    answer = Answer(3000, tokens=tokens, first_s=2.0 if not source else 0.1, cached=cached)
    return Asked(when, source, QUESTIONS[0], answer, {"DEVICE": 1, "HOST": 2, "SSD": 3})


@pytest.fixture
def run():
    return [
        asked("cold", "", {}, [1, 2]),
        asked("warm from HOST", "host", {"host": 2944}, [3, 4]),
        asked("warm from SSD", "ssd", {"ssd": 2944}, [5, 6]),
    ]


@pytest.fixture
def model():
    class Model:
        text = None

    return Model()


def test_the_first_text_that_is_long_enough_is_taken(tmp_path):
    (tmp_path / "a.py").write_text("x" * 10)
    (tmp_path / "b.py").write_text("y" * 4000)
    assert long_text(len, tmp_path, ("none.py", "a.py", "b.py")) == ("b.py", "y" * 4000)
    with pytest.raises(Unavailable, match=r"a\.py"):
        long_text(len, tmp_path, ("a.py",))


def test_a_good_run_is_good(run, model, capsys):
    assert show(Printer(Format.TABLE), run, [[1, 2], [3, 4], [5, 6]], model)
    out = capsys.readouterr().out
    for words in ("cold", "2.00 s", "20.0x", "2,944", "equal", "All tokens equal"):
        assert words in out


def test_a_wrong_token_fails_the_demo(run, model, capsys):
    assert not show(Printer(Format.TABLE), run, [[1, 2], [3, 9], [5, 6]], model)
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("cached", [{}, {"host": 2000, "device": 900}, {"ssd": 2944}])
def test_a_prompt_from_the_wrong_tier_fails_the_demo(run, model, cached, capsys):
    run[1] = asked("warm from HOST", "host", cached, [3, 4])
    assert not show(Printer(Format.TABLE), run, [[1, 2], [3, 4], [5, 6]], model)
    assert "the prompt came from" in capsys.readouterr().out


def test_a_cold_question_that_was_not_cold_fails_the_demo(run, model):
    run[0] = asked("cold", "", {"host": 64}, [1, 2])
    assert not show(Printer(Format.TABLE), run, [[1, 2], [3, 4], [5, 6]], model)


def test_common_start():
    assert common_start([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == [1, 2]
    assert common_start([[1], [2]]) == []
    assert common_start([[1, 2]]) == [1, 2]


def test_progress_tells_steps_on_stderr(capsys, monkeypatch):
    stream = io.StringIO()
    with Progress() as progress:
        monkeypatch.setattr(progress, "_console", Console(file=stream))
        with progress.step("waiting for tea"):
            progress.report("water", 1, 2)
        progress.say("it is hot")
    assert "ok  waiting for tea" in stream.getvalue()
    assert "it is hot" in stream.getvalue()
