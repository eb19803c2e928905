"""Strings that clients chose cannot steer the terminal of whoever looks: every command, every string field."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from typer.testing import CliRunner

from kvstore.core.errors import InvalidArgument
from kvstore.tools.kvctl.main import COMMANDS, make_app
from kvstore.tools.output import Format, Printer, clean

ESCAPES = "\x1b[2J\x1b]0;title\x07\r\n\x9b31m\u202e\u2066\u200b\u2028\x7f[bold][/nothing]:smile:"
PLAIN = "x" * len(ESCAPES)
KEY = "01" * 32
ARGUMENTS = {
    "status": ["--counters"], "show": [KEY], "match": [KEY], "why": [KEY], "du": ["--segments"], "pin": [KEY],
    "unpin": [KEY], "explain": [KEY], "top": ["--count", "1", "--every", "0.2"], "drain": [], "verify": [],
    "evict": ["--tier", "host", "--bytes", "1"],
}  # fmt: skip
WORDS = [
    *([name, *ARGUMENTS.get(name, [])] for panel in COMMANDS.values() for name in panel),
    ["ls", "-n", ""], ["ls", "01" * 32], ["quarantine", "--help"],
]  # fmt: skip


def fill(message: Message, text: str) -> Message:
    """Every field set, every string ``text``; lists and maps have one entry."""
    for field in message.DESCRIPTOR.fields:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            key = text if kind.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING else 1
            value = kind.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[key] = scalar(value, text)
        elif kind is not None:
            inner = getattr(message, field.name)
            fill(inner.add() if field.is_repeated else inner, text)
        elif field.is_repeated:
            getattr(message, field.name).append(scalar(field, text))
        elif field.name not in ("next_page_token", "cursor"):
            setattr(message, field.name, scalar(field, text))
    return message


def scalar(field: Any, text: str) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return text
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([1]) * 32
    return True if field.type == FieldDescriptor.TYPE_BOOL else 1


class Hostile:
    """A daemon that answers everything with ``text``, or refuses everything with it."""

    def __init__(self, text: str, *, refuses: bool = False) -> None:
        self._text, self._refuses = text, refuses

    def connect(self, socket: str, timeout: float) -> Hostile:
        return self

    def call(self, method: str, request: Message, reply_class: Any, timeout: float) -> Message:
        if self._refuses:
            raise InvalidArgument(self._text, self._text, self._text)
        return fill(reply_class(), self._text)

    def close(self) -> None:
        """Nothing to close."""


def output(daemon: Hostile, words: list[str]) -> str:
    done = CliRunner().invoke(make_app(daemon.connect, "/run/test.sock"), words, prog_name="kvctl")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout + done.stderr


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("output_format", list(Format))
def test_no_command_prints_what_steers_a_terminal(words: list[str], refuses: bool, output_format: Format) -> None:
    asked = [*words, "-o", output_format]
    found = output(Hostile(ESCAPES, refuses=refuses), asked)
    assert [c for c in found if not c.isprintable() and c != "\n"] == []
    assert found.count("\n") == output(Hostile(PLAIN, refuses=refuses), asked).count("\n")


def test_all_of_a_string_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(Format.TABLE)
    for way in (printer.line, printer.whole_line, printer.talk):
        way(ESCAPES)
    shown = capsys.readouterr()
    wanted = "␛[2J␛]0;title␇␍␊�31m����␡[bold][/nothing]:smile:\n"
    assert (shown.out, shown.err) == (2 * wanted, wanted)


@pytest.mark.parametrize("text", ["", "plain", "Größe 5 µs — naïve 日本 🎉", "━━── 48 MiB"])
def test_what_is_harmless_stays(text: str) -> None:
    assert clean(text) == text


def test_characters_that_no_terminal_shows_become_visible() -> None:
    assert clean("a\tb\u00a0c\u2029d\ud800e\ue000f\x85") == "a␉b c�d�e�f�"
