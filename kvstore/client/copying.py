"""Copies between payloads and places: many blocks a call, in a few threads, past the caches where they are large.

Copies of 64 to 256 KiB run five to eight times slower on some machines when the destination is 1 or 16 bytes past
a page boundary, which is where numpy puts large arrays. ``aligned_buffer`` starts on a page.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.client.steps import Copying
from kvstore.core.errors import InvalidArgument
from kvstore.kernels import native

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks whose slices lie alike: ``layers`` of ``slice_bytes``, a stride apart in targets and one in sources.

    A buffer begins at its block's first slice and reaches to the last one's end at least.
    """

    layers: int
    slice_bytes: int
    to_stride: int
    from_stride: int
    targets: list[memoryview] = field(default_factory=list)
    sources: list[memoryview] = field(default_factory=list)

    def run(self, threads: int) -> None:
        """Copy with numpy, block by block, whatever ``threads`` says: where the C++ kernels are, they copy instead."""
        for target, source in zip(self.targets, self.sources, strict=True):
            np.copyto(self._slices(target, self.to_stride), self._slices(source, self.from_stride))

    def _slices(self, memory: memoryview, stride: int) -> Bytes:
        shape, strides = (self.layers, self.slice_bytes), (stride, 1)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint8), shape, strides)


def copy_all(groups: Iterable[Copying], threads: int) -> None:
    """Copy, on ``threads`` threads at most where the C++ kernels are; the GIL is free meanwhile."""
    for group in groups:
        if isinstance(group, Copies) and native.available():
            lengths = (group.layers, group.slice_bytes, group.to_stride, group.from_stride)
            native.copy_slices([*group.targets], [*group.sources], lengths, threads)
        else:
            group.run(threads)


def aligned_buffer(nbytes: int) -> memoryview:
    """Fresh zeroed memory of this process that starts on a page, huge pages where the kernel gives them."""
    mapped = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[:nbytes]


def as_bytes(field_name: str, buffer: object, nbytes: int) -> memoryview:
    """A flat byte view of any contiguous buffer of exactly ``nbytes``; InvalidArgument naming the field otherwise."""
    try:
        flat = memoryview(buffer).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(field_name, type(buffer).__name__, f"a contiguous buffer of {nbytes} bytes") from error
    if flat.nbytes != nbytes:
        raise InvalidArgument(field_name, f"{flat.nbytes} bytes", f"{nbytes} bytes")
    return flat
