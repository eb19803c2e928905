"""Copies that sum what they wrote: one pass over memory where the C++ kernels are, pieces that stay in cache elsewhere.

The checksum is of the copy, not of its source: so it names what lies at the target, whatever a writer does to the
source meanwhile.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from crc32c import crc32c

from kvstore.kernels import native

PIECE: Final = 256 * 1024


def copy_with_crc(target: memoryview, source: memoryview) -> int:
    """Copy equal lengths and return the CRC-32C of what was written; the GIL is free meanwhile."""
    if native.available():
        return native.copy_crc32c(target, source)
    out, data = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    crc = 0
    for begin in range(0, len(target), PIECE):
        np.copyto(out[begin : begin + PIECE], data[begin : begin + PIECE])
        crc = crc32c(target[begin : begin + PIECE], crc)
    return crc
