"""Printers by format: tables for people, JSON for programs. Data goes to stdout, talk to stderr.

Whatever is printed here is cleaned first, since names, models and reasons come from clients: no string can move the
cursor, colour a terminal, fake a line or hide a part of itself. JSON escapes all of that by itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType

PIPE_COLUMNS: Final = 200
"""Width of tables when nobody watches: nothing is cut for want of columns in a pipe."""


BIT_SETS: Final = frozenset({"residency"})
"""Fields whose bits are tiers: bit 0 is DEVICE."""

TIER_WORDS: Final = {1: "device", 2: "host", 3: "ssd"}
"""Names of tiers; colder ones have their number."""

GAP: Final = 2
"""Blanks between columns."""
YIELDING_COLUMNS: Final = 16
"""What a column that wraps needs at least, to be read."""


class Format(StrEnum):
    """What ``--output`` takes."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its title, whether numbers stand in it, and what it does when space is short.

    One that ``yields`` wraps; one that is ``optional`` is left out where the others would be cut.
    """

    title: str
    right: bool = False
    yields: bool = False
    optional: bool = False


def columns(titles: str) -> list[Column]:
    """Columns of a line of titles, apart by ``|``.

    Marks before a title: ``>`` puts it right, ``~`` lets it wrap, ``?`` lets it go, the last one first.
    """
    found = []
    for title in titles.split("|"):
        name = title.lstrip("?>~")
        marks = title.removesuffix(name)
        found.append(Column(name, right=">" in marks, yields="~" in marks, optional="?" in marks))
    return found


def _shown(character: str) -> str:
    """What stands for a character that is not printed as it is: its picture where there is one."""
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return chr(0x2400 + code) if code < 0x20 else "\u2421"
    return " " if character.isspace() and code not in (0x85, 0x2028, 0x2029) else "\ufffd"


def clean(value: str) -> str:
    """Text that came from anywhere as it may be shown: nothing in it steers a terminal, and none of it is hidden.

    As long as before, with one visible character for each control, each mark that turns the direction of text or has
    no width, each separator of lines, and each that no font can have.
    """
    return value if value.isprintable() else "".join(c if c.isprintable() else _shown(c) for c in value)


def _safe(value: RenderableType) -> RenderableType:
    """A string or a styled text, cleaned; a string is no markup either. Other renderables are ours."""
    if isinstance(value, str):
        return Text(clean(value))
    if isinstance(value, Text) and not value.plain.isprintable():
        found = value.copy()
        found.plain = clean(found.plain)
        return found
    return value


class _Pipe(Console):
    """A console whose reader may go away: that is the caller's to know, not a reason to exit here."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError; rich itself would end the process."""
        raise BrokenPipeError


class Printer:
    """Writes one answer in the format that was asked for."""

    def __init__(self, output: Format) -> None:
        self.format = output
        self._out = _Pipe(
            file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False, soft_wrap=False
        )
        self._talk = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    @property
    def for_people(self) -> bool:
        """Whether tables are wanted."""
        return self.format is Format.TABLE

    @property
    def console(self) -> Console:
        """Where answers go."""
        return self._out

    @property
    def columns(self) -> int:
        """Width of a line."""
        return self._out.width

    def answer(self, message: Message) -> None:
        """A message as JSON, every field named."""
        self.json(plain(message))

    def json_line(self, value: object) -> None:
        """A plain value as JSON on one line, at once: for answers without an end."""
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    def json(self, value: object) -> None:
        """A plain value as JSON, indented; keys stand in the order they are given."""
        sys.stdout.write(json.dumps(value, indent=2) + "\n")

    def line(self, text: RenderableType = "") -> None:
        """A line of the answer."""
        self._out.print(_safe(text))

    def whole_line(self, text: RenderableType) -> None:
        """A line that is never broken, since a command in it is there to be copied."""
        self._out.print(_safe(text), soft_wrap=True)

    def talk(self, text: str, style: str = "") -> None:
        """A line beside the answer, on stderr."""
        self._talk.print(Text(clean(text), style=style))

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[RenderableType]]) -> None:
        """Rows under titles; nothing at all where there are no rows."""
        given = [[_safe(cell) for cell in row] for row in rows]
        if given:
            self._out.print(self.as_table(columns, given))

    def as_table(self, columns: Sequence[Column], rows: Iterable[Sequence[RenderableType]]) -> RenderableType:
        """``table`` as something to be printed: columns, or where they would be cut a cell a line."""
        given = [[_safe(cell) for cell in row] for row in rows]
        kept = fitting(columns, given, self.columns)
        if width_of(columns, given, kept) > self.columns:
            return _records(columns, given)
        columns, shown = [columns[i] for i in kept], [[row[i] for i in kept] for row in given]
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.yields,
                overflow="fold" if column.yields else "ellipsis",
            )
        for row in shown:
            table.add_row(*row)
        return table

    def facts(self, rows: Iterable[tuple[str, RenderableType]]) -> None:
        """Names and values, one a line."""
        self._out.print(_facts(rows))


def _facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(_safe(name), _safe(value))
    return table


def _records(columns: Sequence[Column], rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """Rows one below the other, a cell a line: what a table would have to cut."""
    shown: list[RenderableType] = []
    for row in rows:
        shown += [Text(""), _facts([(column.title, cell) for column, cell in zip(columns, row, strict=True)])]
    return Group(*shown[1:])


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[RenderableType]], width: int) -> list[int]:
    """Positions of the columns that are shown in ``width``: all, or without as many optional ones as it takes."""
    kept = list(range(len(columns)))
    for i in reversed(range(len(columns))):
        if width_of(columns, rows, kept) <= width:
            break
        if columns[i].optional:
            kept.remove(i)
    return kept


def width_of(columns: Sequence[Column], rows: Sequence[Sequence[RenderableType]], kept: Sequence[int]) -> int:
    """Cells that the kept columns need beside each other, those that wrap at their least."""
    wide = [max(len(columns[i].title), *(_cells(row[i]) for row in rows)) for i in kept]
    least = [min(w, YIELDING_COLUMNS) if columns[i].yields else w for w, i in zip(wide, kept, strict=True)]
    return sum(least) + GAP * (len(kept) - 1)


def _cells(value: RenderableType) -> int:
    return value.cell_len if isinstance(value, Text) else cell_len(str(value))


def plain(message: Message) -> dict[str, Any]:
    """A protobuf message as plain values: every field present, bytes in hexadecimal, enums as lower-case words.

    So are sets of tiers (``BIT_SETS``), as lists.
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name in BIT_SETS:
            value = [tier_words(bits) for bits in value] if field.is_repeated else tier_words(value)
            result[field.name] = value
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            result[field.name] = {key: value[key] for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [_plain_value(field, item) for item in value]
        elif field.message_type is not None and not message.HasField(field.name):
            result[field.name] = None
        else:
            result[field.name] = _plain_value(field, value)
    return result


def tier_words(bits: int) -> list[str]:
    """The tiers of a residency set, hot to cold: 6 is ``["host", "ssd"]``."""
    numbers = (number for number in range(1, bits.bit_length() + 1) if bits >> (number - 1) & 1)
    return [TIER_WORDS.get(number, f"tier{number}") for number in numbers]


def _plain_value(field: Any, value: Any) -> Any:  # noqa: ANN401 - what a field holds is known at run time only
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type, value)
    return value.hex() if isinstance(value, bytes) else value


def enum_word(enum_type: Any, number: int) -> str:  # noqa: ANN401 - a descriptor of either protobuf implementation
    """``TIER_HOST`` of the enum ``Tier`` as ``host``; the number where this version knows no name for it."""
    value = enum_type.values_by_number.get(number)
    if value is None:
        return str(number)
    common = enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value.name.removeprefix(common).lower())
