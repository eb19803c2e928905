"""``kvbench quality``: what it says of what the probe found, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.engine.quality import Quality
from kvstore.tools.kvbench.quality import rows_of, run_quality, table_of
from kvstore.tools.kvbench.report import Report, report_section
from tests.engine.paths import model_folder

FP16 = Quality("fp16", 4096, 1e-6, 1.0, 10.0, 10.0, 0.0005)
INT8 = Quality("int8", 4096, 1e-4, 0.995, 10.01, 10.0, 0.0075)


def test_rows_stand_beside_fp16_and_the_targets():
    rows = rows_of([FP16, INT8], "t.txt")
    assert [row.case for row in rows[4:]] == [
        "int8, KL, t.txt", "int8, other argmax, t.txt", "int8, perplexity, t.txt", "int8, attention error, t.txt",
    ]  # fmt: skip
    assert [row.value for row in rows[4:]] == [1e-4, pytest.approx(0.5), pytest.approx(0.1), 0.0075]
    assert [row.limit for row in rows[4:]] == [1e-6, 0.0, 0.0, 0.0005]
    assert [row.target for row in rows[4:]] == ["<= 1.5e-4", "<= 0.7 %", "within 0.2 %", ""]
    assert all(row.limit is None for row in rows_of([INT8], "t.txt"))


def test_the_table_has_a_line_a_codec_and_the_bytes_of_each():
    table = table_of([("t.txt", [FP16, INT8])], (3, 64))
    assert table.rows[1][:5] == ("t.txt", "fp16", "100.0%", "1.00e-06", "100.00%")
    assert table.rows[2] == ("t.txt", "int8", "52.3%", "1.00e-04", "99.50%", "10.0100", "+0.100%", "0.0075")
    written = report_section(Report(rows_of([FP16, INT8], "t.txt"), [table]))
    assert "| target | int8 |  | <= 1.5e-4 | >= 99.3 % |" in written
    assert "tokens 4096, coded every token of every layer" in written


def test_wrong_input_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="--codec is 'int4'"):
        run_quality(tmp_path, [], 256, ["int4"])
    with pytest.raises(InvalidArgument, match="--model"):
        run_quality(tmp_path, [], 256, [])


@pytest.mark.model
def test_a_text_that_cannot_be_measured_is_refused_before_any_is(tmp_path):
    short, absent = tmp_path / "short.txt", tmp_path / "absent.txt"
    short.write_text("Only a few words.")
    for path, words in ((short, "short.txt: .* tokens"), (absent, "absent.txt")):
        with pytest.raises(InvalidArgument, match=words):
            run_quality(model_folder(), [path], 256, [])


@pytest.mark.model
def test_int8_on_the_real_model(tmp_path):
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text())
    report = run_quality(model_folder(), [text], 256, ["int8", "int8", "fp16"])
    kl = {row.case: row.value for row in report.rows if "KL" in row.case}
    assert list(kl) == ["int8, KL, text.py", "fp16, KL, text.py"]
    assert 0 < kl["fp16, KL, text.py"] < 5e-6
    assert 1e-5 < kl["int8, KL, text.py"] < 5e-4
