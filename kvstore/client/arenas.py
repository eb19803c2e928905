"""The memory of a session as this process maps it: HOST read-only, DEVICE and BUFFER writable.

A mapping lives as long as any view of it: after a reconnect the views of the old session stay readable, and
their memory goes when the last of them does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from kvstore.core.errors import Unavailable
from kvstore.core.types import Area
from kvstore.v1 import session_pb2

_POPULATE: Final = {mmap.PROT_READ: 22, mmap.PROT_READ | mmap.PROT_WRITE: 23}
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE: page tables filled now, not by faults inside a copy."""


@dataclass(frozen=True, slots=True)
class CudaArena:
    """A DEVICE arena in GPU memory: what opens it with CUDA IPC."""

    nbytes: int
    device: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class Arenas:
    """What one session can address."""

    views: dict[Area, memoryview] = field(default_factory=dict)
    versions: dict[Area, memoryview[int]] = field(default_factory=dict)
    """The version of each page of an area, as the daemon has it now; areas without versions have no entry."""
    cuda: CudaArena | None = None

    def view(self, area: Area) -> memoryview:
        """The mapped area. Raises Unavailable if this session has it not mapped."""
        found = self.views.get(area)
        if found is None:
            raise Unavailable(
                f"{area.name} is not mapped by this session", field="area", value=area.name, expected=self._mapped()
            )
        return found

    def device_tensor(self) -> Any:
        """DEVICE as a flat uint8 tensor on its GPU; None where it is shared memory. Unavailable if it is not mapped."""
        if self.cuda is None:
            self.view(Area.DEVICE)
            return None
        # By name, since torch is for engines: a client on shared memory must not load it.
        ipc = import_module("kvstore.tiers.device_ipc")
        return ipc.map_device(self.cuda.handle, self.cuda.nbytes, self.cuda.device)

    def _mapped(self) -> str:
        return ", ".join(area.name for area in self.views) or "a same-host session, which has areas"


def map_arenas(infos: Sequence[session_pb2.ArenaInfo], fds: Sequence[int], *, wanted: bool) -> Arenas:
    """Map the arenas of a Welcome; all descriptors are closed, whatever happens. Without ``wanted`` none is."""
    try:
        attached = [info for info in infos if info.kind == "memfd"]
        if len(attached) != len(fds):
            raise Unavailable(f"{len(fds)} descriptors came with {len(attached)} arenas")
        if not wanted:
            return Arenas()
        views: dict[Area, memoryview] = {}
        versions: dict[Area, memoryview[int]] = {}
        for info, fd in zip(attached, fds, strict=True):
            area, whole = Area(info.area), _map(info, fd)
            views[area] = whole[: info.bytes]
            if info.versions_offset:
                pages = -(-info.bytes // 4096)
                behind = whole[info.versions_offset : info.versions_offset + 8 * pages]
                versions[area] = behind.toreadonly().cast("Q")
        remote = [CudaArena(i.bytes, i.device, i.cuda_ipc_handle) for i in infos if i.kind == "cuda-ipc"]
        return Arenas(views, versions, remote[0] if remote else None)
    finally:
        for fd in fds:
            os.close(fd)


def _map(info: session_pb2.ArenaInfo, fd: int) -> memoryview:
    # The whole file is mapped, since memory on huge pages is mapped and unmapped in whole huge pages.
    size = os.fstat(fd).st_size
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if info.writable else 0)
    try:
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    except OSError as error:
        raise Unavailable(f"the {Area(info.area).name} arena of {size} bytes can not be mapped: {error}") from error
    _populate(mapped, protection)
    return memoryview(mapped)


def _populate(mapped: mmap.mmap, protection: int) -> bool:
    try:
        mapped.madvise(_POPULATE[protection])
    except OSError:
        # Kernels before 5.14 do not know the advice; pages then come at first touch.
        return False
    return True
