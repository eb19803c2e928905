"""What the machine itself can do: copies between memories, direct reads and writes, a message there and back."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

DISK_PIECE_BYTES: Final = 4 << 20
DISK_PIECES: Final = 64
DISK_DEPTH: Final = 8


def shared_memory(nbytes: int) -> Bytes:
    """Shared memory as arenas have it, faulted in, filled with noise; lives as long as the array."""
    descriptor = os.memfd_create("kvbench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    memory = np.frombuffer(mapped, np.uint8)
    memory[:] = noise(nbytes)
    return memory


def noise(nbytes: int, seed: int = 1) -> Bytes:
    """Random bytes, the same for the same seed; made of one MiB repeated, which no cache here can use."""
    unit = np.random.default_rng(seed).integers(0, 256, min(nbytes, 1 << 20), np.uint8)
    return np.resize(unit, nbytes)


class MemoryCopies:
    """Copies of ``count`` pieces of ``nbytes``, from a large shared memory to a fixed place, in ``threads``.

    The same work as reading a batch out of an arena that is larger than the caches: that is the limit of such a
    read, in the same run and on the same pages.
    """

    def __init__(self, nbytes: int, count: int, threads: int, source_bytes: int = 256 << 20) -> None:
        self._source = shared_memory(source_bytes)
        self._destination = np.frombuffer(mmap.mmap(-1, nbytes * count), np.uint8)
        self._destination[:] = 0
        self._nbytes, self._count = nbytes, count
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self._next = 0

    @property
    def batch_bytes(self) -> int:
        """Bytes of one call."""
        return self._nbytes * self._count

    def __call__(self) -> None:
        """Copy one batch."""
        begin = self._next
        self._next = (begin + self.batch_bytes) % (self._source.size - 2 * self.batch_bytes)
        parts = [range(start, self._count, self._threads) for start in range(self._threads)]
        others = [self._pool.submit(self._copy, begin, part) for part in parts[1:]] if self._pool else []
        self._copy(begin, parts[0])
        for other in others:
            other.result()

    def _copy(self, begin: int, pieces: range) -> None:
        size = self._nbytes
        for piece in pieces:
            at = piece * size
            np.copyto(self._destination[at : at + size], self._source[begin + at : begin + at + size])

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class DirectFile:
    """A file without a name on the disk of ``directory``, read and written around the page cache.

    ``sources`` are what its pieces are written from, in turns; ``targets``, one a thread, what they are read into. They
    are the memory of whoever is compared with this: how pages lie in physical memory is worth 20 % of direct I/O.
    """

    def __init__(
        self, directory: Path, pieces: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> None:
        self._descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        self._pieces = pieces
        self._piece_bytes = len(sources[0])
        self._sources, self._targets = sources, targets
        self._depth = len(targets)
        self._pool = ThreadPoolExecutor(self._depth)
        self.write()

    @property
    def batch_bytes(self) -> int:
        """Bytes of one call."""
        return self._pieces * self._piece_bytes

    def write(self) -> None:
        """Write the whole file once and sync it."""
        sources = self._sources
        self._each(lambda piece, _, at: os.pwrite(self._descriptor, sources[piece % len(sources)], at))
        os.fdatasync(self._descriptor)

    def read(self) -> None:
        """Read the whole file once."""
        self._each(lambda _, lane, at: os.preadv(self._descriptor, [self._targets[lane]], at))

    def _each(self, work: Callable[[int, int, int], int]) -> None:
        def lane(number: int) -> None:
            for piece in range(number, self._pieces, self._depth):
                done = work(piece, number, piece * self._piece_bytes)
                if done != self._piece_bytes:
                    raise OSError(f"{done} of {self._piece_bytes} bytes")

        for lane_done in [self._pool.submit(lane, number) for number in range(self._depth)]:
            lane_done.result()

    def close(self) -> None:
        """Give the space back."""
        self._pool.shutdown()
        os.close(self._descriptor)


@contextmanager
def echo(reply_bytes: int) -> Iterator[Callable[[bytes], None]]:
    """A process that answers each message on a raw Unix socket with ``reply_bytes``; yields the call."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstore.tools.kvbench.echo", str(reply_bytes)],
        stdin=there.fileno(),
        stdout=subprocess.DEVNULL,
    )
    there.close()

    def call(request: bytes) -> None:
        here.sendall(len(request).to_bytes(4, "little") + request)
        left = reply_bytes
        while left:
            data = here.recv(left)
            if not data:
                raise ConnectionError("the echo process has ended")
            left -= len(data)

    try:
        yield call
    finally:
        here.close()
        child.wait(timeout=10)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A folder for one run under ``parent``, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvbench-", dir=parent) as folder:
        yield Path(folder)


def disk_bandwidth(folder: Path) -> float:
    """Bytes a second that the disk of a folder reads around the page cache, in large pieces with depth."""
    memory = [shared_memory(DISK_PIECE_BYTES).data.cast("B") for _ in range(DISK_DEPTH)]
    file = DirectFile(folder, DISK_PIECES, memory, memory)
    try:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            file.read()
            times.append(time.perf_counter() - begun)
        return file.batch_bytes / min(times)
    finally:
        file.close()
