"""Memory that holds blocks, as tensors and addresses: the areas of the cache, and the engine's own pool.

The pool is anonymous memory of the shape of the DEVICE area. It is used only while the cache gives no place (it is
gone, drains, or is full of what others hold), and what lies in it is never shared.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import torch

from kvstore.core.namespace import BlockLayout

_DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Region:
    """A stretch of this process's memory. Holds the mapping alive; ``layers`` is the blocks' number of slices."""

    def __init__(self, memory: memoryview | mmap.mmap, layers: int) -> None:
        data = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(data.ctypes.data)
        self.layers = layers
        self.nbytes = data.nbytes
        self._data = data

    def elements(self, dtype: str) -> torch.Tensor:
        """The whole stretch as a flat tensor of ``dtype``; writable memory only."""
        return torch.from_numpy(self._data).view(_DTYPES[dtype])


class PrivatePool:
    """Equal pieces of anonymous memory, mapped at first use; pages are given back when the last piece is freed."""

    def __init__(self, layout: BlockLayout, bytes_max: int) -> None:
        self._layout = layout
        self._blocks_max = bytes_max // layout.device_bytes
        self._memory: mmap.mmap | None = None
        self._region: Region | None = None
        self._free: list[int] = []
        self.used_blocks = 0

    @property
    def region(self) -> Region:
        """The pool's memory, mapped now if it was not."""
        if self._region is None:
            self._memory = mmap.mmap(-1, max(1, self._blocks_max) * self._layout.device_bytes)
            self._region = Region(self._memory, self._layout.layers)
            self._free = list(range(self._blocks_max - 1, -1, -1))
        return self._region

    def take(self) -> int | None:
        """Offset of a free piece in ``region``, or None when all are taken."""
        if self.region is None or not self._free:
            return None
        self.used_blocks += 1
        return self._free.pop() * self._layout.device_bytes

    def give_back(self, offset: int) -> None:
        """Free a piece that ``take`` returned."""
        self._free.append(offset // self._layout.device_bytes)
        self.used_blocks -= 1
        if self.used_blocks == 0 and self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._free.sort(reverse=True)
