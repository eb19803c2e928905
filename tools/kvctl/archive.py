"""The file of ``kvctl export``: one namespace with its blocks, checked. docs/format.md has the layout."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from crc32c import crc32c
from google.protobuf.message import DecodeError

from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import KEY_BYTES, ROOT_PARENT, BlockKey, Codec
from kvstore.v1 import admin_pb2
from kvstore.wire import messages

MAGIC: Final = b"kvstore-archive\x01"
RECORD: Final = struct.Struct("<IQI")
"""Kind, bytes of the payload, and CRC-32C of both and the payload, continued from that of the record before."""
HEAD_BYTES: Final = 12
"""Of kind and length."""
NAMESPACE, BLOCK, END = 1, 2, 3
BLOCK_HEAD: Final = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sI")
"""Key, parent, codec; the slices follow as ``get`` hands them out."""
COUNT: Final = struct.Struct("<Q")
_CODECS: Final = set(map(int, Codec))
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
        nbytes = sum(len(part) for part in parts)
        head = RECORD.pack(kind, nbytes, 0)[:HEAD_BYTES]
        for part in (head, *parts):
            self._crc = crc32c(part, self._crc)
        self._file.write(RECORD.pack(kind, nbytes, self._crc))
        for part in parts:
            self._file.write(part)
        self.nbytes += nbytes

    def add(self, key: BlockKey, parent: BlockKey, codec: Codec, payload: memoryview) -> None:
        """One block, whose parent was added before."""
        self._record(BLOCK, BLOCK_HEAD.pack(key, parent, int(codec)), payload)
        self.blocks += 1

    def finish(self) -> None:
        """The archive is whole: synced, and there under its name."""
        self._record(END, COUNT.pack(self.blocks))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        try:
            # A link fails where a file came meanwhile; a rename would replace it.
            os.link(self._partial, self._path)
        except FileExistsError:
            raise
        except OSError:
            # A filesystem without hard links.
            os.rename(self._partial, self._path)
        self._partial.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


class ArchiveReader:
    """Reads one file, which it keeps open: what it has verified is what it hands out."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb")
        self._bytes = os.fstat(self._file.fileno()).st_size
        self.info = admin_pb2.NamespaceInfo()
        self.blocks = 0

    def verify(self, told: Callable[[int, int], None]) -> None:
        """Read all of it: ``info`` and ``blocks`` are known then. ``told`` is told bytes read and bytes in all.

        InvalidArgument, naming the byte, if it is not whole, or has what no export writes.
        """
        layout, known = None, {ROOT_PARENT}
        for at, kind, payload in self._records():
            if kind == NAMESPACE:
                try:
                    self.info.ParseFromString(payload)
                    layout = BlockLayout.of(messages.spec_of(self.info.spec))
                except DecodeError as error:
                    raise _broken(at, "no namespace stands here") from error
            elif kind == BLOCK and layout is not None:
                key, parent, codec = BLOCK_HEAD.unpack_from(payload)
                if parent not in known:
                    raise _broken(at, "a block comes before its parent")
                if codec not in _CODECS or len(payload) - BLOCK_HEAD.size != payload_bytes(layout, Codec(codec)):
                    raise _broken(at, f"a block of {len(payload)} bytes and codec {codec} is none of its namespace")
                known.add(key)
                self.blocks += 1
                told(at, self._bytes)
            elif len(payload) != COUNT.size or COUNT.unpack(payload)[0] != self.blocks:
                raise _broken(at, f"{self.blocks} blocks came, and the end says another number")

    def read(self) -> Iterator[ArchivedBlock]:
        """The blocks, in order, after ``verify``."""
        for _, kind, payload in self._records():
            if kind == BLOCK:
                key, parent, codec = BLOCK_HEAD.unpack_from(payload)
                yield ArchivedBlock(BlockKey(key), BlockKey(parent), Codec(codec), payload[BLOCK_HEAD.size :])

    def _records(self) -> Iterator[tuple[int, int, bytes]]:
        """Where each record begins, its kind and its payload; the first is the namespace's and the last the end's."""
        file, crc, kind, wanted = self._file, 0, 0, {NAMESPACE}
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidArgument("FILE", "of another kind", "what kvctl export of this version has written")
        while kind != END:
            at = file.tell()
            head = file.read(RECORD.size)
            if len(head) < RECORD.size:
                raise _broken(at, "the file is cut off here")
            kind, nbytes, expected = RECORD.unpack(head)
            if kind not in wanted or nbytes > PAYLOAD_MAX or (kind == BLOCK and nbytes < BLOCK_HEAD.size):
                raise _broken(at, f"a record of kind {kind} and {nbytes} bytes stands here")
            payload = file.read(nbytes)
            crc = crc32c(payload, crc32c(head[:HEAD_BYTES], crc))
            if len(payload) < nbytes or crc != expected:
                raise _broken(at, "the record that begins here is not the one that was written")
            wanted = {BLOCK, END}
            yield at, kind, payload
        if file.read(1):
            raise _broken(file.tell() - 1, "something follows the archive's end")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def payload_bytes(layout: BlockLayout, codec: Codec) -> int:
    """Bytes of a block's payload under a codec, as ``get`` hands it out."""
    return layout.units_of(codec) * (layout.raw_slice_bytes if codec is Codec.RAW else layout.slice_bytes)


def _broken(at: int, what: str) -> InvalidArgument:
    return InvalidArgument("FILE", f"damaged at byte {at:,}: {what}", "a whole file of kvctl export")
