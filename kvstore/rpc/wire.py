"""What the streams Read and Write carried, for the counters of Status. Used on the daemon's event loop only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.wire.chunks import AnyChunk, plain_bytes


@dataclass(slots=True)
class Carried:
    """Payload bytes of one direction as they were before coding, and what coding kept off the wire."""

    nbytes: int = 0
    saved_bytes: int = 0

    def count(self, chunk: AnyChunk) -> int:
        """Count one chunk; returns its plain bytes."""
        size = plain_bytes(chunk)
        self.nbytes += size
        self.saved_bytes += size - len(chunk.data)
        return size


@dataclass(slots=True)
class Wire:
    """Both directions, as a client sees them."""

    read: Carried = field(default_factory=Carried)
    write: Carried = field(default_factory=Carried)

    def counters(self) -> dict[str, int]:
        """By the names that docs/operations.md lists."""
        return {
            "wire_read_bytes": self.read.nbytes,
            "wire_read_saved_bytes": self.read.saved_bytes,
            "wire_written_bytes": self.write.nbytes,
            "wire_written_saved_bytes": self.write.saved_bytes,
        }
