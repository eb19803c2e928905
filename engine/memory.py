"""Memory that holds blocks, as tensors and addresses: the areas of the cache, and the engine's own pool.

DEVICE is memory of this host, or of a GPU (**not run on hardware yet**): then the engine computes there, and reads HOST
in place through the GPU's own address of it.

The pool is anonymous memory of the shape of the DEVICE area, on the same device. It is used while the cache gives no
place (it is gone, drains, or is full of what others hold), and what lies in it then is never shared; where the cache
has no DEVICE, new blocks are filled there and copied to the session's buffer when they are full.
"""

from __future__ import annotations

import logging
import mmap
from typing import Final

import numpy as np
import torch

from kvstore.cache import Cache
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import Area
from kvstore.tiers.device_ipc import PinnedHost
from kvstore.tiers.host import locked_memory_hint

LOG: Final = logging.getLogger("kvstore.engine")
CPU: Final = torch.device("cpu")

_DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Region:
    """A stretch of memory. Holds the mapping alive; ``layers`` is the blocks' number of slices.

    ``memory`` is a flat uint8 tensor, or this process's memory. ``address`` is where kernels find the first byte:
    with ``pinned``, those of the GPU.
    """

    def __init__(
        self, memory: memoryview | mmap.mmap | torch.Tensor, layers: int, pinned: PinnedHost | None = None
    ) -> None:
        self.layers = layers
        self._pinned = pinned
        self._data = memory if isinstance(memory, torch.Tensor) else np.frombuffer(memory, dtype=np.uint8)
        self.nbytes = self._data.nbytes
        if isinstance(self._data, torch.Tensor):
            self.device, self.address = self._data.device, self._data.data_ptr()
        else:
            self.device = CPU
            self.address = int(self._data.ctypes.data) if pinned is None else pinned.address

    def elements(self, dtype: str) -> torch.Tensor:
        """The whole stretch as a flat tensor of ``dtype``; writable memory only."""
        flat = self._data if isinstance(self._data, torch.Tensor) else torch.from_numpy(self._data)
        return flat.view(_DTYPES[dtype])

    def slices(self, offset: int, nbytes: int, stride: int) -> torch.Tensor:
        """The slices of the block at ``offset``, uint8 [layers, nbytes], in place; writable memory only."""
        flat = self._data if isinstance(self._data, torch.Tensor) else torch.from_numpy(self._data)
        return flat.as_strided((self.layers, nbytes), (stride, 1), offset)


def map_areas(cache: Cache, layers: int) -> dict[Area, Region]:
    """DEVICE and HOST of the cache; without HOST if DEVICE is on a GPU that can not read this host's memory.

    HOST and the session's buffer where there is no DEVICE. Raises Unavailable if HOST can not be mapped, or neither
    DEVICE nor a buffer.
    """
    try:
        tensor = cache.device_tensor()
        device = cache.memory(Area.DEVICE) if tensor is None else None
    except Unavailable as error:
        if error.field != "area":
            raise
        LOG.info("no DEVICE (%s): new blocks go to HOST through the session's buffer", error)
        return _host_and_buffer(cache, layers)
    if device is not None:
        # Blocks are written into the buffer, from where a commit copies them to DEVICE; all else is read only.
        return {Area.DEVICE: Region(device, layers), **_host_and_buffer(cache, layers)}
    regions = {Area.DEVICE: Region(tensor, layers)}
    memory = cache.memory(Area.HOST)
    try:
        pinned = PinnedHost(memory, tensor.device.index or 0)
    except Unavailable as error:
        LOG.warning(
            "the GPU can not read HOST in place (%s), so blocks go to DEVICE first: %s", error, locked_memory_hint()
        )
    else:
        regions[Area.HOST] = Region(memory, layers, pinned)
    return regions


def _host_and_buffer(cache: Cache, layers: int) -> dict[Area, Region]:
    try:
        return {area: Region(cache.memory(area), layers) for area in (Area.HOST, Area.BUFFER)}
    except Unavailable as error:
        raise Unavailable(f"{error}; an engine needs a session with a buffer (buffer_bytes)") from error


class PrivatePool:
    """Equal pieces of anonymous memory, mapped at first use; on a host, pages go when the last piece is freed."""

    def __init__(self, layout: BlockLayout, bytes_max: int, device: torch.device = CPU) -> None:
        self._layout = layout
        self._device = device
        self._blocks_max = bytes_max // layout.device_bytes
        self._memory: mmap.mmap | None = None
        self._region: Region | None = None
        self._free: list[int] = []
        self.used_blocks = 0

    @property
    def region(self) -> Region:
        """The pool's memory, mapped now if it was not."""
        if self._region is None:
            nbytes = max(1, self._blocks_max) * self._layout.device_bytes
            if self._device.type == "cuda":
                self._region = Region(torch.empty(nbytes, dtype=torch.uint8, device=self._device), self._layout.layers)
            else:
                self._memory = mmap.mmap(-1, nbytes)
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
