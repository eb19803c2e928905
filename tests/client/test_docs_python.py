"""docs/python.md is true: its examples run, in order, against a daemon, and its table has every option."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore.client import ClientOptions
from kvstore.core.types import Outcome

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
RESTARTED = "# The daemon was restarted."


@pytest.fixture(scope="module")
def scope(daemon):
    """What the names of the page stand for at its end."""
    names: dict[str, object] = {}
    for number, example in enumerate(EXAMPLES):
        if RESTARTED in example:
            assert daemon.stop() == 0
            daemon.start()
        code = example.replace("/run/kvstore/kvstored.sock", str(daemon.socket))
        code = code.replace("/run/kvstore/nobody.sock", str(daemon.folder / "nobody.sock"))
        exec(compile(code, f"docs/python.md, example {number}", "exec"), names)  # noqa: S102  it is our own page
    return names


def test_what_is_stored_is_found_and_read(scope):
    hits = (Outcome.HIT,) * 3
    assert len(scope["keys"]) == 3
    assert scope["stored"].outcomes == scope["got"].outcomes == hits
    assert scope["found"].matched == 3
    assert [bytes(part) for part in scope["got"].payloads] == scope["payloads"]
    assert scope["first_byte"] == 2
    assert scope["outcomes"] == hits


def test_views_show_the_bytes_and_hold(scope):
    assert scope["lengths"] == [scope["layout"].raw_slice_bytes] * 3
    assert scope["total"] == 0 + 1 + 2
    assert scope["believed"]
    assert scope["believed_to_the_end"]
    assert scope["async_held"]


def test_an_engine_loads_what_was_put_and_stores_it_again(scope):
    hits = (Outcome.HIT,) * 3
    assert scope["loaded"] == scope["step_outcomes"] == hits
    for page, payload in zip(scope["pages"], scope["payloads"], strict=True):
        assert b"".join(cache[page].tobytes() for cache in scope["caches"]) == payload
    assert scope["finished"] == [scope["loading"], scope["stored_again"]]


def test_held_blocks_are_not_removed(scope):
    assert scope["held"] == (True, True)
    assert scope["refused"] == (Outcome.BUSY, Outcome.BUSY)


def test_the_job_ends_with_places(scope):
    assert scope["result"].outcomes == (Outcome.HIT,) * 3
    assert all(scope["result"].places)


def test_failures_are_told_as_the_page_says(scope):
    nbytes = len(scope["payloads"][0])
    assert scope["wrong"] == ("payloads[0]", "9 bytes", f"{nbytes} bytes")
    assert scope["missed"] == (Outcome.MISS,) * 3
    assert "connect:UNAVAILABLE" in scope["failures"]
    assert scope["reason"] == "UNAVAILABLE"


def test_blocks_hit_after_a_restart_and_in_a_child(scope):
    assert scope["ready"] is True
    assert scope["after_restart"] == (Outcome.HIT,) * 3
    assert scope["child_status"] == 0


def test_every_option_is_in_the_table():
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert rows == [item.name for item in fields(ClientOptions)]
