"""Bytes that failed a check, kept aside: one file each in ``quarantine/``, within a bound.

::

    0   8   magic "KVQUARA1"
    8   4   version, 1
    12  4   bytes of the cause
    16  8   bytes kept
    24  32  block key, zeros where there is none
    56  4   CRC of bytes 0..56 and of the cause
    60      cause as UTF-8, then the bytes

Keeping is a courtesy to whoever looks for the reason: when there is no room, or the disk refuses, the cause is
logged and nothing is kept.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import KEY_BYTES, BlockKey
from kvstore.kernels.layout import align_up
from kvstore.tiers.maintained import QuarantineEntry
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.files import read_pages, read_range
from kvstore.tiers.ssd.format import VERSION, unpack_extent_head
from kvstore.tiers.ssd.port import read_full, write_full
from kvstore.tiers.ssd.table import Extent

DIRECTORY: Final = "quarantine"
NUMBER_DIGITS: Final = 12
"""Names with longer numbers are not ours."""
_MAGIC: Final = b"KVQUARA1"
_HEAD: Final = struct.Struct("<8sIIQ32s")
_CRC: Final = struct.Struct("<I")
_NO_KEY: Final = BlockKey(bytes(KEY_BYTES))


def keep_block(core: Core, quarantine: Quarantine, block: tuple[Extent, int, BlockKey], cause: str) -> None:
    """Set aside a block's slices as they lie on disk, without their checks. The segment is in use by the caller."""
    extent, position, key = block
    shape = core.shape(extent)
    fd = core.segments[extent.segment].fd
    data = bytearray()
    if shape.pages:
        data += _coded_bytes(core, fd, extent, position)
    for layer in range(0 if shape.pages else shape.layers):
        if len(data) >= quarantine.room_bytes:
            break
        offset = extent.offset + shape.slice_offset(layer, position)
        begin = offset // PAGE_BYTES * PAGE_BYTES
        for at in range(begin, offset + shape.slice_bytes, core.config.io_bytes):
            some = read_pages(core, fd, at, min(core.config.io_bytes, offset + shape.slice_bytes - at))
            data += some[offset - at if at == begin else 0 :]
        del data[(layer + 1) * shape.slice_bytes :]
    quarantine.keep(f"{key.hex()[:16]}", bytes(data), cause, key)


def _coded_bytes(core: Core, fd: int, extent: Extent, position: int) -> bytes:
    """A block's coded slices; only the head of the extent if that is damaged itself."""
    head_bytes = core.shape(extent).head_bytes
    data = read_pages(core, fd, extent.offset, head_bytes)
    try:
        coded = unpack_extent_head(memoryview(data)).coded
        places = [] if coded is None else coded.places(extent.offset + head_bytes, position)
    except (CorruptBlock, IndexError) as error:
        log.warning("only the head of extent %d is kept: %s", extent.number, error)
        return data
    return b"".join(read_range(core, fd, offset, nbytes) for offset, nbytes in places)


class Quarantine:
    """The directory of what was set aside. The core's lock guards the list."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._entries: dict[str, QuarantineEntry] = {}
        self._next = 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.bytes for entry in self._entries.values())

    @property
    def room_bytes(self) -> int:
        """Bytes that may still be kept."""
        return max(0, self._core.config.quarantine_limit - self.total_bytes - 2 * PAGE_BYTES)

    def load(self) -> None:
        """List what is there."""
        core = self._core
        core.port.mkdir(DIRECTORY)
        core.ledger.set_file(DIRECTORY, core.port.stat(DIRECTORY).allocated)
        for name in core.port.listdir(DIRECTORY):
            path = f"{DIRECTORY}/{name}"
            stat = core.port.stat(path)
            core.ledger.set_file(path, stat.allocated)
            self._entries[path] = self._describe(path, stat.size)
            number = name.partition("-")[0]
            known = number.isascii() and number.isdigit() and len(number) <= NUMBER_DIGITS
            self._next = max(self._next, int(number) + 1 if known else 0)

    def fit(self) -> None:
        """Delete the oldest files where a lowered cap has no room for all."""
        for entry in self.entries():
            if self.total_bytes <= self._core.config.quarantine_limit:
                return
            self._delete(entry)

    def keep(self, label: str, data: bytes, cause: str, key: BlockKey = _NO_KEY) -> None:
        """Write ``data`` aside, or as much of it as there is room for."""
        core = self._core
        log.warning("set aside: %s, %d bytes: %s", label, len(data), cause)
        text = cause.encode()
        with core.lock:
            size = min(len(data), self.room_bytes - len(text))
            path = f"{DIRECTORY}/{self._next:08d}-{label}"
            self._next += 1
            if size <= 0:
                return
            # The place is taken before the file is written, so that two at once do not pass the bound.
            self._entries[path] = QuarantineEntry(path, size, key, cause)
        fixed = _HEAD.pack(_MAGIC, VERSION, len(text), size, key)
        head = fixed + _CRC.pack(crc32c(text, crc32c(fixed))) + text
        try:
            fd = core.port.open(path, create=True)
            try:
                write_full(core.port, fd, memoryview(head + data[:size]), 0)
                core.port.fdatasync(fd)
                stat = core.port.fstat(fd)
            finally:
                core.port.close(fd)
        except OSError as error:
            log.warning("could not set aside %s: %s", path, error)
            with core.lock:
                self._entries.pop(path, None)
            return
        with core.lock:
            core.ledger.set_file(path, stat.allocated)
            core.ledger.set_file(DIRECTORY, core.port.stat(DIRECTORY).allocated)

    def take_file(self, name: str, cause: str) -> None:
        """Move a damaged file of metadata aside, or remove it when it is larger than the room."""
        core = self._core
        size = core.port.stat(name).size
        if size > self.room_bytes:
            log.error("removed %s, %d bytes, too large to set aside: %s", name, size, cause)
            core.port.unlink(name)
        else:
            path = f"{DIRECTORY}/{self._next:08d}-{name}"
            self._next += 1
            core.port.rename(name, path)
            self._entries[path] = QuarantineEntry(path, size, _NO_KEY, cause)
            core.ledger.set_file(path, core.port.stat(path).allocated)
        core.ledger.remove_file(name)
        core.port.sync_directory("")

    def entries(self) -> list[QuarantineEntry]:
        """What was set aside, oldest first."""
        with self._core.lock:
            return [self._entries[path] for path in sorted(self._entries)]

    def empty(self) -> None:
        """Delete everything set aside."""
        for entry in self.entries():
            self._delete(entry)

    def _delete(self, entry: QuarantineEntry) -> None:
        core = self._core
        try:
            core.port.unlink(entry.file)
        except FileNotFoundError:
            log.debug("%s was gone already", entry.file)
        with core.lock:
            self._entries.pop(entry.file, None)
            core.ledger.remove_file(entry.file)

    def _describe(self, path: str, size: int) -> QuarantineEntry:
        port = self._core.port
        fd = port.open(path)
        try:
            data = bytearray(min(size, PAGE_BYTES))
            read_full(port, fd, memoryview(data), 0)
        finally:
            port.close(fd)
        if len(data) >= _HEAD.size + 4 and data[:8] == _MAGIC:
            _, _, length, kept, key = _HEAD.unpack_from(data)
            text = bytes(data[_HEAD.size + 4 :][:length])
            if _CRC.unpack_from(data, _HEAD.size)[0] == crc32c(text, crc32c(bytes(data[: _HEAD.size]))):
                return QuarantineEntry(path, min(kept, size), BlockKey(key), text.decode("utf-8", "replace"))
        return QuarantineEntry(path, align_up(size, 1), _NO_KEY, "a damaged file")
