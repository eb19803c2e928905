"""Rows: the schema that programs read, fractions, and the table."""

from __future__ import annotations

import json

import pytest

from kvstore.tools.kvbench.kernels import rows_of
from kvstore.tools.kvbench.markdown import section, write_section
from kvstore.tools.kvbench.rows import Row, median, number, percentile, print_rows, rate, take_turns
from kvstore.tools.output import Format, Printer

SCHEMA = {"bench", "case", "value", "unit", "limit", "limit_unit", "fraction", "peers", "conditions"}


def row(**changes):
    made = {"bench": "b", "case": "c", "value": 50.0, "unit": "MB/s", "limit": 100.0, "limit_unit": "MB/s", **changes}
    return Row(**made)


def test_the_fields_are_those_that_were_promised_and_plain():
    plain = row(peers={"other": 1.0}, conditions={"rounds": 3}, limit_name="memcpy", target=">= 0.9").plain()
    assert set(plain) == SCHEMA
    assert json.loads(json.dumps(plain)) == plain
    assert plain["conditions"] == {"rounds": 3, "limit": "memcpy", "target": ">= 0.9", "peers": "published"}


@pytest.mark.parametrize(
    ("changes", "fraction"),
    [
        ({}, 0.5),
        ({"unit": "ms", "limit_unit": "ms", "value": 4.0, "limit": 1.0}, 0.25),
        ({"unit": "reads", "limit_unit": "reads", "value": 5.0, "limit": 4.0}, 0.8),
        ({"unit": "times", "limit_unit": "times", "value": 2.0, "limit": 4.0}, 0.5),
        ({"limit": None, "limit_unit": ""}, None),
        ({"limit_unit": "GB/s"}, None),
        ({"value": 0.0}, None),
        ({"value": -1.0}, None),
    ],
)
def test_a_fraction_of_one_is_at_the_limit_whatever_the_unit(changes, fraction):
    assert row(**changes).fraction == fraction


def test_json_is_a_list_of_rows(capsys):
    print_rows(Printer(Format.JSON), [row(), row(case="d")])
    out = capsys.readouterr().out
    assert [one["case"] for one in json.loads(out)] == ["c", "d"]


def test_the_table_names_limit_and_peers(capsys):
    print_rows(Printer(Format.TABLE), [row(limit_name="memcpy", peers={"Redis": 12.0}), row(limit=None, limit_unit="")])
    out = capsys.readouterr().out
    for words in ("50 MB/s", "100 MB/s  memcpy", "0.50", "12  Redis", "not measured here"):
        assert words in out


def test_rows_of_the_kernels_keep_their_numbers():
    found = {
        "bench": "codec",
        "case": "quantise",
        "value": 3.0,
        "unit": "GB/s of fp16",
        "limit": 4.0,
        "limit_unit": "GB/s, a plain copy",
        "target": ">= 3 GB/s",
        "peers": {"torch": 1.0},
        "conditions": {"threads": 1},
    }
    (made,) = rows_of([found])
    assert (made.unit, made.limit_unit, made.limit_name, made.fraction) == ("GB/s", "GB/s", "a plain copy", 0.75)
    assert made.target == ">= 3 GB/s"
    assert made.plain()["conditions"]["peers"] == "same run"


def test_a_document_s_section_is_replaced_and_the_rest_kept(tmp_path):
    path = tmp_path / "performance.md"
    path.write_text("# Figures\n\n<!-- kvbench b -->\nold\n<!-- end of kvbench b -->\n\n## More\n")
    rows = [row(limit_name="memcpy", peers={"Redis": 12.0}, conditions={"depth": 8}), row(conditions={"depth": 8})]
    for _ in range(2):
        write_section(path, "b", section(rows))
        write_section(path, "other", "new")
    text = path.read_text()
    assert "old" not in text
    assert text.startswith("# Figures\n\n<!-- kvbench b -->\nOn ")
    assert "| c | 50 MB/s | 100 MB/s, memcpy | 0.50 | - |" in text
    assert "depth 8." in text
    assert "| c, MB/s | Redis 12 |" in text
    assert text.count("## More") == text.count("<!-- kvbench b -->") == text.count("<!-- kvbench other -->") == 1


def test_statistics():
    values = [float(n) for n in range(1, 101)]
    assert median(values) == 50.5
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7
    assert rate(1 << 20, 0.5) == pytest.approx(2.097152)
    assert [number(v) for v in (None, 12345.6, 12.0, 1.234, 0.01234)] == ["-", "12,346", "12", "1.23", "0.0123"]


def test_cases_take_turns_and_warm_up_does_not_count():
    order: list[str] = []
    seconds = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warm_up=2)
    assert order == ["a", "b"] * 5
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3}
