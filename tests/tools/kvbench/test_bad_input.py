"""Wrong values are one line and a documented code."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.tools.kvbench import main


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("store", "--quick", "-s", "none"), main.UNREACHABLE),
        (("disk", "--quick", "-d", "none"), main.USAGE),
        (("disk", "--quick", "-d", "file"), main.USAGE),
        (("restart", "--quick", "-d", "x" * 5000), main.USAGE),
        (("attention", "--threads", "9" * 20), main.USAGE),
        (("restart", "--blocks", "0"), main.USAGE),
        (("crowd", "--clients", "300,201"), main.USAGE),
        (("crowd", "--quick", "--plot", "none/picture.png"), main.USAGE),
        (("crowd", "--quick", "--plot", "picture.txt"), main.USAGE),
    ],
)
def test_wrong_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    ran = CliRunner().invoke(main.app, list(words), prog_name="kvbench")
    assert ran.exit_code == code
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    assert len(ran.stderr.splitlines()) == 1 or ran.stderr.startswith("Usage:")


def test_ctrl_c_and_a_document_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_printer: object) -> list[main.Row]:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        main._run(main.Format.JSON, None, interrupt)
    assert ended.value.code == main.INTERRUPTED
    row = main.Row(bench="b", case="c", value=1.0, unit="ms")
    with pytest.raises(SystemExit) as ended:
        main._run(main.Format.JSON, tmp_path, lambda _: [row])
    assert ended.value.code == main.USAGE
