"""The file of ``kvctl export``: one namespace with its blocks, checked. docs/format.md has the layout."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from crc32c import crc32c

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, BlockKey, Codec
from kvstore.v1 import admin_pb2

MAGIC: Final = b"kvstore-archive\x01"
RECORD: Final = struct.Struct("<IIQ")
"""Kind, CRC-32C of the payload continued from that of all payloads before, and bytes of the payload."""
NAMESPACE, BLOCK, END = 1, 2, 3
BLOCK_HEAD: Final = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sI")
"""Key, parent, codec; the slices follow as ``get`` hands them out."""
PAYLOAD_MAX: Final = (1 << 30) + (1 << 20)


class ArchivedBlock(NamedTuple):
    """One block; parents come before their children."""

    key: BlockKey
    parent: BlockKey
    codec: Codec
    payload: bytes


class ArchiveWriter:
    """Writes an archive beside its place and puts it there when it is whole. InvalidArgument where there is a file."""

    def __init__(self, path: Path, info: admin_pb2.NamespaceInfo) -> None:
        if path.exists():
            raise InvalidArgument("FILE", repr(str(path))[:200], "a file that does not exist yet")
        self._path, self._partial = path, path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: BinaryIO = self._partial.open("xb")
        self._crc, self.blocks, self.nbytes = 0, 0, 0
        self._file.write(MAGIC)
        known = admin_pb2.NamespaceInfo(
            namespace_id=info.namespace_id, name=info.name, spec=info.spec, policy=info.policy
        )
        self._record(NAMESPACE, known.SerializeToString())

    def _record(self, kind: int, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._crc = crc32c(part, self._crc)
        nbytes = sum(len(part) for part in parts)
        self._file.write(RECORD.pack(kind, self._crc, nbytes))
        for part in parts:
            self._file.write(part)
        self.nbytes += nbytes

    def add(self, key: BlockKey, parent: BlockKey, codec: Codec, payload: memoryview) -> None:
        """One block, whose parent was added before."""
        self._record(BLOCK, BLOCK_HEAD.pack(key, parent, int(codec)), payload)
        self.blocks += 1

    def finish(self) -> None:
        """The archive is whole: synced, and there under its name."""
        self._record(END, struct.pack("<Q", self.blocks))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # A link fails where a file came meanwhile; a rename would replace it.
        os.link(self._partial, self._path)
        self._partial.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def verify(path: Path, told: Callable[[int, int], None]) -> tuple[admin_pb2.NamespaceInfo, int]:
    """Read all of an archive: its namespace and how many blocks it has. ``told`` is told bytes read and bytes in all.

    InvalidArgument, naming the byte, if it is not whole.
    """
    total, blocks = path.stat().st_size, 0
    info = admin_pb2.NamespaceInfo()
    for at, kind, payload in _records(path):
        if kind == NAMESPACE:
            info.ParseFromString(payload)
        elif kind == BLOCK:
            blocks += 1
            told(at, total)
        elif struct.unpack("<Q", payload)[0] != blocks:
            raise _broken(at, f"it ends after {struct.unpack('<Q', payload)[0]} blocks; {blocks} came")
    return info, blocks


def read(path: Path) -> Iterator[ArchivedBlock]:
    """The blocks of an archive that was verified, in order."""
    for _, kind, payload in _records(path):
        if kind == BLOCK:
            key, parent, codec = BLOCK_HEAD.unpack_from(payload)
            yield ArchivedBlock(BlockKey(key), BlockKey(parent), Codec(codec), payload[BLOCK_HEAD.size :])


def _records(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Where each record begins, its kind and its payload; the first is the namespace's and the last the end's."""
    crc, kind, wanted = 0, 0, {NAMESPACE}
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidArgument("FILE", repr(str(path))[:200], "what kvctl export of this version has written")
        while kind != END:
            at = file.tell()
            head = file.read(RECORD.size)
            if len(head) < RECORD.size:
                raise _broken(at, "the file is cut off here")
            kind, expected, nbytes = RECORD.unpack(head)
            if kind not in wanted or nbytes > PAYLOAD_MAX or (kind == BLOCK and nbytes < BLOCK_HEAD.size):
                raise _broken(at, f"a record of kind {kind} and {nbytes} bytes stands here")
            payload = file.read(nbytes)
            crc = crc32c(payload, crc)
            if len(payload) < nbytes or crc != expected:
                raise _broken(at, "the bytes of the record that begins here are not those that were written")
            wanted = {BLOCK, END}
            yield at, kind, payload
        if file.read(1):
            raise _broken(file.tell() - 1, "something follows the archive's end")


def _broken(at: int, what: str) -> InvalidArgument:
    return InvalidArgument("FILE", f"damaged at byte {at:,}: {what}", "a whole file of kvctl export")
