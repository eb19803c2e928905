"""Greedy tokens over int8: how prompts are cut, what the report says, and once the whole of it on a real model."""

from __future__ import annotations

import json

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Tier
from kvstore.engine.counters import Counters
from kvstore.engine.forcing import Choice
from kvstore.engine.reference import Reference
from kvstore.tools.kvbench.greedy import TOKENS_MIN, TOKENS_STEP, Job, cut, default_texts, run_greedy
from kvstore.tools.kvbench.greedy_report import Answered, report_of, total_of
from kvstore.tools.kvbench.report import print_report, report_section
from kvstore.tools.output import Format, Printer
from tests.engine.paths import model_folder


class Words:
    """A tokenizer for which each character is a token."""

    def encode(self, text):
        return [ord(letter) for letter in text]


def texts_of(folder, *lengths):
    paths = []
    for index, length in enumerate(lengths):
        path = folder / f"{index}.txt"
        path.write_text("".join(chr(33 + (index + place) % 90) for place in range(length)))
        paths.append(path)
    return paths


def test_prompts_grow_and_begin_in_parts_of_their_own(tmp_path):
    paths = texts_of(tmp_path, 2000, 3000)
    prompts = cut(Words(), paths, 5)
    assert [len(prompt.tokens) for prompt in prompts] == [TOKENS_MIN + TOKENS_STEP * index for index in range(5)]
    assert [prompt.text for prompt in prompts] == ["0.txt", "1.txt", "0.txt", "1.txt", "0.txt"]
    assert [prompt.cold for prompt in prompts] == [Tier.HOST, Tier.HOST, Tier.SSD, Tier.SSD, Tier.HOST]
    whole = Words().encode(paths[0].read_text())
    assert [prompt.tokens[0] for prompt in prompts[::2]] == [whole[0], whole[666], whole[1332]]


def test_a_text_that_is_too_short_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"0\.txt: 600 tokens"):
        cut(Words(), texts_of(tmp_path, 600, 3000), 3)
    with pytest.raises(InvalidArgument, match="absent"):
        cut(Words(), [tmp_path / "absent"], 1)


def test_texts_of_both_kinds_are_on_every_machine():
    texts = default_texts()
    assert len(texts) == 20
    assert all(path.is_file() for path in texts)
    assert len(set(texts)) == 11


TEACHER = tuple(Choice(token, margin) for token, margin in ((5, 2.0), (6, 0.25), (7, 0.5), (8, 4.0)))
ANSWERED = [
    Answered("a.py", 320, {"host": 256}, TEACHER, [5, 6, 7, 8], [5, 6, 0, 8]),
    Answered("b.py", 1368, {"ssd": 1344}, TEACHER, [5, 0, 1, 8], [5, 6, 7, 8]),
]
STORED = Counters(blocks_demoted=11)
COUNTED = Counters(tokens_attended=8000, tokens_attended_int8=7000, blocks_demoted=3)


def test_the_totals_are_over_all_prompts():
    total = total_of(ANSWERED, COUNTED)
    assert (total.tokens, total.same, total.same_alone, total.attended_int8) == (8, 0.75, 0.875, 0.875)
    assert total.margins_other == [0.25, 0.5]
    assert len(total.margins) == 8


def test_programs_get_each_prompt_and_the_places_that_differ(capsys):
    print_report(Printer(Format.JSON), report_of(ANSWERED, STORED, COUNTED))
    rows = json.loads(capsys.readouterr().out)
    assert [(row["value"], row["limit"]) for row in rows] == [(75.0, 87.5), (87.5, None), (100.0, None), (50.0, None)]
    assert rows[3]["conditions"]["places"] == [1, 2]
    assert rows[3]["conditions"]["from"] == {"ssd": 1344}


def test_people_and_documents_get_where_it_differs_and_by_how_much(capsys):
    report = report_of(ANSWERED, STORED, COUNTED)
    print_report(Printer(Format.TABLE), report)
    shown, written = capsys.readouterr().out, report_section(report)
    for text in (shown, written):
        for words in (
            "75.00% of 8",
            "87.50% of 8",
            "87.5% of 8,000",
            "11 storing, 3 answering",
            "256 HOST, 1,344 SSD, 88",
        ):
            assert words in text
        assert "0.375 where int8 differs, at most 0.5" in text
    assert "| b.py | 1,368 | 1,344 SSD | 2 of 4 | 4 of 4 | 2 (0.25), 3 (0.5) |" in written
    assert "| a.py | 320 | 256 HOST | 4 of 4 | 3 of 4 | - |" in written
    assert written.startswith("On ")
    assert "tokens of a prompt 320 to 1368" in written


def test_without_a_difference_no_margin_of_one_is_named():
    report = report_of(ANSWERED[:1], STORED, COUNTED)
    assert "where int8 differs, at most" not in report_section(report)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_engine_over_int8_in_host_and_on_ssd():
    folder = model_folder()
    report = run_greedy(Job(folder, tuple(default_texts()[:3]), prompts=3, answer=3))
    same, attended, *each = report.rows
    assert attended.value > 80
    assert [row.conditions["from"] for row in each] == [{"host": 256}, {"host": 320}, {"ssd": 320}]
    assert same.value >= 7 / 9 * 100
    assert same.limit == 100


@pytest.mark.model
def test_the_choices_of_transformers_over_its_own_answer_are_the_answer():
    reference = Reference(model_folder())
    prompt = list(range(300, 340))
    (answer,) = reference.answers([prompt], 5)
    assert reference.choices(prompt, answer) == answer
    fed = [answer[0] + 1, *answer[1:]]
    chosen = reference.choices(prompt, fed)
    assert chosen[0] == answer[0]
    assert chosen == [reference.answers([prompt + fed[:place]], 1)[0][0] for place in range(5)]
