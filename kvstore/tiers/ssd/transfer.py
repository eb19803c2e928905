"""The two I/Os that carry blocks: a checked read into callers' memory, a write gathered from it.

A read goes through the pool's buffer, since it may end long after its caller gave up; its slices are copied out and
checked in one pass over memory. A write may take the caller's memory as it is (where it is aligned for direct I/O):
should it end late, it changes only bytes that no record will ever name.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.tiers.copying import copy_with_crc
from kvstore.tiers.lossless import decode_slice
from kvstore.tiers.ssd.iopool import Gate
from kvstore.tiers.ssd.port import DiskPort, read_full, write_full

log: Final = logging.getLogger("kvstore.ssd")

COPY_WITH_NUMPY_BYTES: Final = 32768
"""From this size a numpy copy, which lets other threads run, beats a slice assignment, which does not."""
PARTS_MAX: Final = 1000
"""The system takes 1,024 parts in one write."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths; large ones without holding other threads up."""
    if len(source) >= COPY_WITH_NUMPY_BYTES:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    else:
        target[:] = source


@dataclass(slots=True)
class Piece:
    """A slice, or a part of a large one, that one read brings. Offsets are in the segment."""

    offset: int
    nbytes: int
    into: memoryview
    index: int
    """Which BlockRead of the call it is for."""
    crc: int | None
    crc_bytes: int
    planes: int = 0
    """Of a coded slice; 0 for one that lies as it is."""


@dataclass(slots=True)
class ReadChunk:
    """One read of whole pages that covers some pieces."""

    port: DiskPort
    fd: int
    begin: int
    nbytes: int
    pieces: list[Piece]
    corrupt: list[int] = field(default_factory=list)

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Read, copy, check. Bytes that fail are in the caller's memory then, with a status that says so."""
        got = read_full(self.port, self.fd, buffer[: self.nbytes], self.begin)
        if not gate.enter_copy():
            return
        try:
            for piece in self.pieces:
                at = piece.offset - self.begin
                if at + piece.nbytes > got or not deliver(piece, buffer[at : at + piece.nbytes]):
                    self.corrupt.append(piece.index)
        finally:
            gate.leave_copy()


def deliver(piece: Piece, data: memoryview) -> bool:
    """Copy a piece to its caller; False if its checksum differs."""
    # The last slice of a read by layers may leave out its padding.
    size = min(len(piece.into), piece.nbytes)
    if piece.planes:
        return _decode(piece, data)
    if piece.crc is None:
        copy_bytes(piece.into[:size], data[:size])
        return True
    good = copy_with_crc(piece.into[: piece.crc_bytes], data[: piece.crc_bytes]) == piece.crc
    if size > piece.crc_bytes:
        piece.into[piece.crc_bytes : size] = data[piece.crc_bytes : size]
    return good


def _decode(piece: Piece, data: memoryview) -> bool:
    """Decode a piece to its caller; False if it does not decode, or to other bytes."""
    target, padding = piece.into[: piece.crc_bytes], piece.into[piece.crc_bytes :]
    padding[:] = bytes(len(padding))
    if len(data) == piece.crc_bytes:
        return copy_with_crc(target, data) == piece.crc
    try:
        decode_slice(data, piece.planes, target)
    except CorruptBlock as damage:
        log.error("%s", damage.message)
        return False
    return int(crc32c(target)) == piece.crc


@dataclass(slots=True)
class WriteChunk:
    """One write of at most io_bytes and a head, gathered from the caller's blocks; zeros up to ``nbytes``."""

    port: DiskPort
    fd: int
    offset: int
    parts: list[memoryview]
    nbytes: int
    aligned: bool = False
    """Every part lies where direct I/O can take it from, but for a first one that is no caller's (the head)."""

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Write from where the bytes lie, or by way of the buffer."""
        if self._write_in_place(buffer) or not gate.enter_copy():
            return
        try:
            at = 0
            for part in self.parts:
                copy_bytes(buffer[at : at + len(part)], part)
                at += len(part)
        finally:
            gate.leave_copy()
        buffer[at : self.nbytes] = bytes(self.nbytes - at)
        write_full(self.port, self.fd, buffer[: self.nbytes], self.offset)

    def _write_in_place(self, buffer: memoryview) -> bool:
        """Write without a copy, if that is possible; False if not."""
        if not self.aligned or len(self.parts) > PARTS_MAX:
            return False
        parts, used = list(self.parts), 0
        if address(parts[0]) % self.port.granule:
            used = len(parts[0])
            buffer[:used] = parts[0]
            parts[0] = buffer[:used]
        missing = self.nbytes - sum(map(len, parts))
        if missing:
            buffer[used : used + missing] = bytes(missing)
            parts.append(buffer[used : used + missing])
        try:
            return self.port.pwrite(self.fd, parts, self.offset) == self.nbytes
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This device wants more alignment than the probe said.
            return False


def address(part: memoryview) -> int:
    """Where memory lies."""
    return int(np.frombuffer(part, dtype=np.uint8).__array_interface__["data"][0])
