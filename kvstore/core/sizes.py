"""Sizes in bytes as people write them: one parser, so that GB means the same to the daemon and to its tools.

Own code, though pydantic has a ``ByteSize``: that one reads the start of a text only ("1,5GiB" is one byte, "64 MiB/s"
is 64 MiB), rounds bits, and takes longer to load than a command takes to run.
"""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BINARY: Final = {f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)}
_DECIMAL: Final = {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_UNITS: Final = {"": 1, "b": 1, **_BINARY, **_DECIMAL}


def parse_size(value: object) -> int:
    """Bytes of 67108864, "64 MiB" or "1.5GB". ValueError if it is no size.

    KiB, MiB, GiB, TiB and PiB are powers of 1,024, KB, MB, GB, TB and PB of 1,000; capitals do not matter. A bare K, M
    or G is refused, since people mean either.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("bytes, or text such as '64 MiB'")
    match = _SIZE.fullmatch(str(value))
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError("bytes, or text such as '64 MiB', with units KiB, MiB, GiB, TiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
