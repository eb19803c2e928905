"""Ways to make a right message wrong: odd values in its fields, damage in its bytes, lies in its frame."""

from __future__ import annotations

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

DEEP: Final = '{"a":' * 5000 + "1" + "}" * 5000
TEXTS: Final = (
    "",
    "x" * 300,
    "x" * 20000,
    "\0",
    "\x1b[2J",
    "{",
    "[" * 3000,
    DEEP,
    '{"a":1,"a":2}',
    "null",
    "1e999",
    "ü" * 9,
)
NUMBERS: Final = (0, 1, 2, 3, 99, 4096, 4097, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS: Final = (0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
LENGTHS: Final = (0, 1, 31, 32, 33, 64, 96, 32 * 4096, 32 * 4097)
MANY: Final = 5000
"""Entries of a repeated field that is made huge."""

BITS: Final = {
    FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64, FieldDescriptor.TYPE_FIXED64: 64,
    FieldDescriptor.TYPE_FIXED32: 32, FieldDescriptor.TYPE_INT32: 31, FieldDescriptor.TYPE_INT64: 63,
    FieldDescriptor.TYPE_ENUM: 31, FieldDescriptor.TYPE_BOOL: 1,
}  # fmt: skip


def value_for(rng: random.Random, field: Any, near: Any) -> Any:
    """An odd value of a field's type; ``near`` is what is there now, which odd keys are made from."""
    if field.type in BITS:
        value = rng.choice(NUMBERS) & ((1 << BITS[field.type]) - 1)
        return bool(value) if field.type == FieldDescriptor.TYPE_BOOL else value
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    return bytes_for(rng, near if isinstance(near, bytes) else b"")


def bytes_for(rng: random.Random, near: bytes) -> bytes:
    """Odd bytes: of a length that is nearly right, the same key again and again, or what is there, damaged."""
    choice = rng.random()
    if choice < 0.3 and near:
        return damaged(rng, near)
    if choice < 0.5 and near:
        return near * rng.choice((2, 3, 100))
    if choice < 0.6:
        return bytes(rng.choice(LENGTHS))
    return rng.randbytes(rng.choice(LENGTHS))


def spoiled(rng: random.Random, message: Message) -> None:
    """Put an odd value into one field of a message, at any depth."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = rng.choice(fields)
    if field.message_type is not None:
        if repeated(field):
            del getattr(message, field.name)[:]
        elif rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            spoiled(rng, getattr(message, field.name))
        return
    if not repeated(field):
        setattr(message, field.name, value_for(rng, field, getattr(message, field.name)))
        return
    entries = getattr(message, field.name)
    count = rng.choice((0, 1, 2, 17, MANY)) if rng.random() < 0.9 else len(entries)
    value = value_for(rng, field, entries[0] if len(entries) else None)
    if isinstance(value, str | bytes) and len(value) > 100:
        count = min(count, 17)
    del entries[:]
    entries.extend([value] * count)


def repeated(field: Any) -> bool:
    """Whether a field is a list."""
    said = getattr(field, "is_repeated", None)
    return bool(said) if isinstance(said, bool) else field.label == FieldDescriptor.LABEL_REPEATED


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a bit flipped, a piece cut, doubled or put in, or the end missing."""
    piece = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(piece)) if piece else 0
        choice = rng.randrange(5)
        if choice == 0 and piece:
            piece[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            del piece[at : at + rng.randrange(1, 9)]
        elif choice == 2:
            piece[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif choice == 3:
            piece[at:at] = piece[at : at + 32]
        else:
            del piece[at:]
    return bytes(piece)


def mutated(rng: random.Random, message: Message) -> bytes:
    """A right message made wrong; now and then it stays right, so that the daemon's state moves."""
    copy = type(message)()
    copy.CopyFrom(message)
    choice = rng.random()
    if choice < 0.08:
        return copy.SerializeToString()
    if choice < 0.75:
        for _ in range(rng.choice((1, 1, 2, 3))):
            spoiled(rng, copy)
        return copy.SerializeToString()
    return damaged(rng, copy.SerializeToString())
