"""Keys by row, 32 bytes each, one after another: a key as an object would take 80 bytes and a reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.types import KEY_BYTES, BlockKey


class KeyColumn:
    """A column of keys. Rows that are free hold zeros, as the parent of a root does."""

    def __init__(self, packed: bytes | bytearray = b"") -> None:
        self._packed = bytearray(packed)

    def __len__(self) -> int:
        return len(self._packed) // KEY_BYTES

    def __getitem__(self, row: int) -> BlockKey:
        begin = row * KEY_BYTES
        key = bytes(self._packed[begin : begin + KEY_BYTES])
        if len(key) != KEY_BYTES:
            raise IndexError(row)
        return BlockKey(key)

    def __setitem__(self, row: int, key: BlockKey) -> None:
        begin = row * KEY_BYTES
        self._packed[begin : begin + KEY_BYTES] = key

    def __iter__(self) -> Iterator[BlockKey]:
        return (self[row] for row in range(len(self)))

    def append(self, key: BlockKey) -> None:
        """One row more."""
        self._packed += key

    def extend(self, keys: Iterable[BlockKey]) -> None:
        """Many rows more."""
        self._packed += b"".join(keys)

    def load(self, packed: NDArray[np.uint8]) -> None:
        """Rows more, of uint8 [rows, 32]."""
        self._packed += packed.tobytes()

    def rows(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Keys of some rows: uint8 [rows, 32], the caller's own."""
        whole = np.frombuffer(self._packed, np.uint8).reshape(-1, KEY_BYTES)
        return whole[rows]

    def some(self, rows: NDArray[np.intp]) -> list[BlockKey]:
        """Keys of some rows."""
        found: list[BlockKey] = self.rows(rows).view(f"V{KEY_BYTES}").ravel().tolist()
        return found

    def copy(self) -> KeyColumn:
        """The column as it is now."""
        return KeyColumn(self._packed)

    def __sizeof__(self) -> int:
        return self._packed.__sizeof__()
