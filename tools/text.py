"""Numbers and keys as people read them, and back."""

from __future__ import annotations

from typing import Final

from kvstore.core import sizes
from kvstore.core.errors import InvalidArgument

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SIZE_MAX: Final = (1 << 63) - 1
KEY_SHOWN: Final = 12
"""Hexadecimal digits of a key in tables: enough to be unambiguous in any store, and accepted by ``show``."""


def size(nbytes: float) -> str:
    """``1572864`` as ``1.5 MiB``: at most three digits and a unit of 1,024."""
    value = float(nbytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    shown = f"{value:.0f}" if unit == "B" or abs(value) >= 100 or value == int(value) else f"{value:.1f}"
    return f"{shown} {unit}"


def parse_size(field: str, text: str) -> int:
    """``1.5GiB``, ``64MB`` or ``4096`` as bytes, as ``core.sizes`` says. InvalidArgument naming ``field``."""
    try:
        nbytes = sizes.parse_size(text)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(field, repr(text[:80]), "a number of bytes such as 4096, 64MiB or 1.5GiB") from error
    if nbytes > SIZE_MAX:
        raise InvalidArgument(field, repr(text[:80]), "less than 8 EiB")
    return nbytes


def count(number: int) -> str:
    """``1234567`` as ``1,234,567``."""
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """``1 lease``, ``2 leases``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """``7384.2`` as ``2 h 3 min``; two units at most."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def short_key(key: bytes) -> str:
    """The first digits of a key or namespace id; a dash for none."""
    return key.hex()[:KEY_SHOWN] if any(key) else "-"


def full_key(key: bytes) -> str:
    """All digits of a key."""
    return key.hex()
