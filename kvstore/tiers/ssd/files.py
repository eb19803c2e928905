"""Small whole-file and whole-page reads and writes that several verbs need."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.kernels.layout import align_up
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.iopool import Gate
from kvstore.tiers.ssd.port import DiskPort, read_full, write_full


@dataclass(slots=True)
class PageChunk:
    """A read of whole pages into memory of its own."""

    port: DiskPort
    fd: int
    offset: int
    nbytes: int
    data: bytes = b""

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Read; nothing of the caller's is touched."""
        del gate
        got = read_full(self.port, self.fd, buffer[: self.nbytes], self.offset)
        self.data = bytes(buffer[:got])


def read_pages(core: Core, fd: int, offset: int, nbytes: int) -> bytes:
    """Read whole pages, ``nbytes`` rounded up, through the pool's aligned buffers; fewer at the end. Raises OSError."""
    chunk = PageChunk(core.port, fd, offset, align_up(nbytes, PAGE_BYTES))
    core.reads.do(chunk, core.config.io_deadline_s)
    return chunk.data


def read_range(core: Core, fd: int, offset: int, nbytes: int) -> bytes:
    """Read bytes that may begin and end within pages; fewer at the end of the file. Raises OSError."""
    before = offset % PAGE_BYTES
    return read_pages(core, fd, offset - before, before + nbytes)[before : before + nbytes]


def read_file(port: DiskPort, name: str) -> bytes:
    """A whole file of metadata."""
    fd = port.open(name)
    try:
        data = bytearray(port.fstat(fd).size)
        got = read_full(port, fd, memoryview(data), 0)
        return bytes(data[:got])
    finally:
        port.close(fd)


def write_file(core: Core, name: str, parts: list[bytes]) -> None:
    """Write a whole file in one step: a temporary one, sync, rename, sync of the directory."""
    temporary = f"{name}.tmp"
    remove_file(core, temporary)
    fd = core.port.open(temporary, create=True)
    try:
        at = 0
        for part in parts:
            write_full(core.port, fd, memoryview(part), at)
            at += len(part)
        core.port.fdatasync(fd)
        allocated = core.port.fstat(fd).allocated
        with core.lock:
            core.ledger.set_file(temporary, allocated)
    finally:
        core.port.close(fd)
    core.port.rename(temporary, name)
    with core.lock:
        core.ledger.remove_file(temporary)
        core.ledger.set_file(name, allocated)
    core.port.sync_directory("")


def append_file(core: Core, name: str, at: int, data: bytes) -> None:
    """Write behind the good bytes of a file, of which there are ``at``, and sync. What a failure left there is cut."""
    fd = core.port.open(name)
    try:
        if core.port.fstat(fd).size > at:
            core.port.truncate(fd, at)
        write_full(core.port, fd, memoryview(data), at)
        core.port.fdatasync(fd)
        allocated = core.port.fstat(fd).allocated
    finally:
        core.port.close(fd)
    with core.lock:
        core.ledger.set_file(name, allocated)


def remove_file(core: Core, name: str) -> None:
    """Remove a file that may be gone already."""
    try:
        core.port.unlink(name)
    except FileNotFoundError:
        log.debug("%s was gone already", name)
    with core.lock:
        core.ledger.remove_file(name)
