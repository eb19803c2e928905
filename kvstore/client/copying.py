"""Copies between payloads and places, fast: whole blocks where slices touch, in a few threads, on aligned pages.

Copies of 64 to 256 KiB run five to eight times slower on some machines when the destination is 1 or 16 bytes past
a page boundary, which is where numpy puts large arrays. ``aligned_buffer`` starts on a page.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import InvalidArgument
from kvstore.kernels import native

Bytes = NDArray[np.uint8]

PARALLEL_BYTES_MIN: Final = 2 << 20
"""Below this a second thread costs more than it saves."""

STREAM_BYTES_MIN: Final = 256 << 10
"""From here on a payload is copied past the caches, which are too small for a batch of such."""

_STREAMS: Final = native.available()


@dataclass(frozen=True, slots=True)
class Run:
    """One block's slices: ``layers`` of ``slice_bytes`` at ``offset``, ``stride`` apart, in some memory."""

    offset: int
    stride: int
    layers: int
    slice_bytes: int

    @property
    def packed_bytes(self) -> int:
        """Bytes without padding between the slices."""
        return self.layers * self.slice_bytes


def aligned_buffer(nbytes: int) -> memoryview:
    """Fresh zeroed memory of this process that starts on a page, huge pages where the kernel gives them."""
    mapped = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[:nbytes]


def as_bytes(field: str, buffer: object, nbytes: int) -> Bytes:
    """A flat byte view of any contiguous buffer of exactly ``nbytes``; InvalidArgument naming ``field`` otherwise."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
        flat = np.frombuffer(view.cast("B"), np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(field, type(buffer).__name__, f"a contiguous buffer of {nbytes} bytes") from error
    if flat.size != nbytes:
        raise InvalidArgument(field, f"{flat.size} bytes", f"{nbytes} bytes")
    return flat


def slices_view(memory: Bytes, run: Run) -> Bytes:
    """The run's slices as an array of shape [layers, slice_bytes], sharing the memory; flat where they touch."""
    if run.stride == run.slice_bytes or run.layers == 1:
        return memory[run.offset : run.offset + run.packed_bytes]
    shape, strides = (run.layers, run.slice_bytes), (run.stride, 1)
    return np.lib.stride_tricks.as_strided(memory[run.offset :], shape, strides)


def copy_pair(source: Bytes, destination: Bytes) -> None:
    """Copy between two views of the same number of bytes; the GIL is free meanwhile."""
    if source.size >= STREAM_BYTES_MIN and _STREAMS and source.flags.c_contiguous and destination.flags.c_contiguous:
        native.copy_past_caches(destination, source)
        return
    np.copyto(destination, source.reshape(destination.shape) if source.ndim <= destination.ndim else source)


class Copier:
    """Copies lists of pairs, split over a few threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="kvstore-copy") if threads > 1 else None

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each source to its destination; returns when all are done."""
        total = sum(source.size for source, _ in pairs)
        if self._pool is None or total < PARALLEL_BYTES_MIN or len(pairs) < 2:
            _copy_all(pairs)
            return
        parts = [pairs[start :: self._threads] for start in range(self._threads)]
        others = [self._pool.submit(_copy_all, part) for part in parts[1:] if part]
        _copy_all(parts[0])
        for other in others:
            other.result()

    def start(self, task: Callable[[], None]) -> None:
        """Run a task beside the caller; at once, here, if there is no second thread."""
        if self._pool is None:
            task()
        else:
            self._pool.submit(task)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _copy_all(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    for source, destination in pairs:
        copy_pair(source, destination)
