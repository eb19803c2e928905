"""What a Welcome says of memory: areas, sizes, and the descriptors that travel beside it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.types import Area
from kvstore.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class ArenaExport:
    """One arena that clients may map.

    ``fd`` is a descriptor that stays the daemon's (clients get a duplicate), or -1 for "cuda-ipc", where
    ``device`` and ``handle`` say what to open.
    """

    area: Area
    nbytes: int
    fd: int
    writable: bool
    kind: str = "memfd"
    device: int = 0
    handle: bytes = b""
    versions_offset: int = 0
    """Where the versions of its pages begin in the memory of ``fd``; 0 for none."""

    def message(self) -> session_pb2.ArenaInfo:
        """The arena's line in a Welcome."""
        return session_pb2.ArenaInfo(
            area=int(self.area),  # type: ignore[arg-type]
            bytes=self.nbytes,
            writable=self.writable,
            kind=self.kind,
            device=self.device,
            cuda_ipc_handle=self.handle,
            versions_offset=self.versions_offset,
        )
