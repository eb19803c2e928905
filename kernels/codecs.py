"""The codecs that there are: one row each, and ``register`` for one more.

A codec encodes slices, each for itself and all to the same size. Its number is the wire's and the disk's and means
the same for ever; its word is what specs say. ``raw`` is a row too: its slices are as the model wrote them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.kernels.layout import SliceGeometry

NUMBERS: Final = range(8)
"""Numbers that a codec may have."""


Coder = Callable[..., "bool | None"]
"""``(source, to, geometry, slices, *, strides)`` between raw and coded slices: buffers that do not overlap, and the
(raw, coded) distances of slices in bytes. An encoder says False if a value does not fit: nothing of use was written."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """All that a codec is. ``encode`` and ``decode`` are None for raw only.

    ``slice_bytes`` gives the bytes of one coded slice, without padding, and raises ValueError for shapes that it can
    not hold. ``mixes`` says whether single layers of a block may stay raw, ``kernel`` whether attention reads coded
    slices as they are: only then can a block be kept under the codec on DEVICE.
    """

    number: int
    word: str
    slice_bytes: Callable[[SliceGeometry], int]
    encode: Coder | None = None
    decode: Coder | None = None
    mixes: bool = True
    kernel: bool = False


_ROWS: Final[dict[str, CodecRow]] = {}
_NUMBERED: Final[dict[int, CodecRow]] = {}


def register(row: CodecRow) -> None:
    """Make a codec known to this process. ValueError if its number or word is taken, or out of range."""
    if row.number not in NUMBERS or row.number in _NUMBERED or not row.word or row.word in _ROWS:
        raise ValueError(f"codec {row.number} {row.word!r}: number or word is taken, or no number of {NUMBERS}")
    _ROWS[row.word] = _NUMBERED[row.number] = row


def words() -> tuple[str, ...]:
    """Words of all codecs, by number."""
    return tuple(_NUMBERED[number].word for number in sorted(_NUMBERED))


def known(number: int) -> bool:
    """Whether there is a codec of this number."""
    return number in _NUMBERED


def row_of(codec: int | str) -> CodecRow:
    """The row of a number or a word. ValueError if there is none."""
    row = _ROWS.get(codec) if isinstance(codec, str) else _NUMBERED.get(codec)
    if row is None:
        raise ValueError(f"codec is {codec!r}; it must be one of {words()}")
    return row


def _late(name: str) -> Coder:
    """A function of ``quant``, imported when it is first called: whoever only asks for sizes needs no numpy."""

    def call(*arguments: object, **named: object) -> bool | None:
        found: Coder = getattr(importlib.import_module("kvstore.kernels.quant"), name)
        return found(*arguments, **named)

    return call


register(CodecRow(0, "raw", lambda geometry: geometry.raw_bytes, kernel=True))
register(CodecRow(1, "int8", lambda geometry: geometry.int8_bytes, _late("quantise"), _late("dequantise"), kernel=True))
