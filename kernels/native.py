"""The C++ kernels as Python functions, and whether they are there at all. The only importer of ``_native``.

The extension is optional: without it (no compiler at installation) ``available()`` is false, callers take the
torch and numpy paths, and one line in the log says why. Functions here expect checked arguments, as ``attention``
and ``quant`` give them; wrong buffer sizes still raise ValueError from C++.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial

if TYPE_CHECKING:
    import mmap

    import numpy as np
    import torch
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap | np.ndarray[Any, Any]"
"""Whatever exports its memory; Python 3.12 has a name for it."""

LEVELS: Final = ("avx512", "avx2", "portable")
"""Instruction-set levels, best first; a machine offers those that it and the build support."""

INTERFACE: Final = 3
"""Of the extension's functions, as ``native/module.cpp`` has it too; with another one the extension is not used."""

_FORMATS: Final = {"float16": 0, "bfloat16": 1, "float32": 2, "int8": 3}
_NOTE: Final = Path(__file__).with_name("_native_failed.txt")


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """``levels`` are usable, best first (empty without the extension); ``reason`` says why it is absent."""

    levels: tuple[str, ...]
    reason: str | None

    @property
    def available(self) -> bool:
        """Whether the C++ kernels can run."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class CopyVariant:
    """How copies of one kind are made on this processor: the form taken, and the GB/s of one thread that chose it.

    ``speeds`` has every form that was timed. Copies of a call are *large* from 1 MiB on.
    """

    kind: str
    form: str
    speeds: Mapping[str, float]


COPY_KINDS: Final = ("small", "small with checksum", "large", "large with checksum")


@functools.cache
def _extension() -> ModuleType | str:
    """The extension module, or why it can not be imported."""
    try:
        found = importlib.import_module("kvstore.kernels._native")
    except ImportError as error:
        built = _NOTE.read_text().strip() if _NOTE.exists() else "it was not built"
        reason = f"{built} ({error})"
    else:
        has = getattr(found, "INTERFACE", 0)
        if has == INTERFACE:
            return found
        reason = f"the extension was built from other sources (interface {has}, wanted {INTERFACE}); build it again"
    log.warning("C++ kernels are absent, the slower torch path is used: %s", reason)
    return reason


def native_status() -> NativeStatus:
    """Say whether the C++ kernels are usable, on which levels, or why not."""
    found = _extension()
    if isinstance(found, str):
        return NativeStatus((), found)
    return NativeStatus(tuple(found.levels()), None)


@functools.cache
def available() -> bool:
    """Whether the C++ kernels can run."""
    return not isinstance(_extension(), str)


def fits(*sides: int) -> bool:
    """Whether the C++ kernels can run on arrays of these sides (up to 256)."""
    found = _extension()
    return not isinstance(found, str) and max(sides) <= found.MAX_SIDE


def holds(geometry: SliceGeometry) -> bool:
    """Whether the C++ kernels can run on slices of this shape."""
    return fits(geometry.head_dim, geometry.block_tokens)


@functools.cache
def _module() -> ModuleType:
    found = _extension()
    if isinstance(found, str):
        raise RuntimeError(f"the C++ kernels are absent: {found}")
    return found


def extension() -> ModuleType:
    """The extension module, for others of this package. RuntimeError where there is none."""
    return _module()


def _shape(geometry: SliceGeometry, codec: str) -> tuple[int, int, int, int]:
    name = geometry.dtype if codec == "raw" else codec
    return geometry.kv_heads, geometry.head_dim, geometry.block_tokens, _FORMATS[name]


def index(tiers: Sequence[int], slots_max: int, *, shared: bool) -> Any:
    """A new index of blocks with columns for these tiers; see ``kvstore/store/columns/native.py``.

    ``shared``: what other processes need to match is in a memfd. It holds so many slots, or 134 million if that is
    less. MemoryError where the system gives no address space for the columns.
    """
    return _module().Index(list(tiers), slots_max, shared)


def mapped_index(fd: int) -> Any:
    """The index of another process, mapped read-only from the memfd ``fd``, which stays the caller's.

    ValueError for what is no index of the layout that this release knows; RuntimeError without the extension.
    """
    return _module().MappedIndex(fd)


def thread_count() -> int:
    """Threads an op may use, the calling one included; by default the processors of this process's affinity."""
    return int(_module().thread_count())


def set_thread_count(count: int) -> None:
    """Set how many threads an op may use; ValueError outside [1, 1024]. Waits for a running op."""
    _module().set_thread_count(count)


def paged_attention(
    query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, *, layer: int, level: str | None = None
) -> Partial:
    """The contract of ``attention.paged_attention`` for checked CPU tensors; ``level`` forces one of ``LEVELS``."""
    rows = query.float().contiguous()
    out, lse = rows.new_empty(rows.shape), rows.new_empty(rows.shape[:2])
    tables = (batch.addresses, batch.starts, batch.query_offsets, batch.context_lens)
    kept = [table.contiguous() for table in tables]  # held by name until the call returns
    _module().paged_attention(
        (rows.data_ptr(), *(table.data_ptr() for table in kept)),
        (out.data_ptr(), lse.data_ptr()),
        (rows.shape[0], rows.shape[1], batch.addresses.shape[0], batch.addresses.shape[1]),
        layer * batch.geometry.slice_stride(batch.codec),
        _shape(batch.geometry, batch.codec),
        (options.scale, options.soft_cap or 0.0, options.window or 0),
        level or "",
    )
    return Partial(out, lse)


def merge(partials: Sequence[Partial], sinks: torch.Tensor | None) -> Partial:
    """The contract of ``attention.merge`` for checked fp32 CPU tensors."""
    outs = [part.out.contiguous() for part in partials]
    logs = [part.lse.contiguous() for part in partials]
    mass = None if sinks is None else sinks.float().contiguous()
    out, lse = outs[0].new_empty(outs[0].shape), logs[0].new_empty(logs[0].shape)
    _module().merge(
        [tensor.data_ptr() for tensor in outs],
        [tensor.data_ptr() for tensor in logs],
        0 if mass is None else mass.data_ptr(),
        tuple(out.shape),
        (out.data_ptr(), lse.data_ptr()),
    )
    return Partial(out, lse)


def quantise(
    raw: Buffer, coded: Buffer, geometry: SliceGeometry, strides: tuple[int, int, int], level: str | None = None
) -> bool:
    """Encode slices; ``strides`` is (raw stride, coded stride, slices). False when refused; see ``quant``."""
    return bool(_module().codec(True, raw, coded, _shape(geometry, "raw"), strides, level or ""))


def dequantise(
    coded: Buffer, raw: Buffer, geometry: SliceGeometry, strides: tuple[int, int, int], level: str | None = None
) -> None:
    """Decode slices; ``strides`` is (raw stride, coded stride, slices)."""
    _module().codec(False, raw, coded, _shape(geometry, "raw"), strides, level or "")


def digest_slices(
    addresses: NDArray[np.int64], geometry: SliceGeometry, codec: str, into: NDArray[np.float16], level: str = ""
) -> None:
    """Digests of the slices at these addresses of this process; ``into`` is [slices, 3, kv_heads, head_dim], dense."""
    kept = addresses if addresses.flags.c_contiguous else addresses.copy()
    _module().digest_slices(kept.ctypes.data, len(kept), _shape(geometry, codec), into.ctypes.data, level)


def digest_scores(
    query: NDArray[np.float32],
    digests: NDArray[np.float16],
    into: tuple[NDArray[np.float32], NDArray[np.float32]],
    level: str = "",
) -> None:
    """Upper bounds and means of scores ``into`` fp32 [blocks, q_heads] each, of a query [q_heads, head_dim] in digests
    [blocks, 3, kv_heads, head_dim]; all dense."""
    blocks, _, heads, dim = digests.shape
    kept = query if query.flags.c_contiguous else query.copy()
    counts = blocks, heads, len(kept) // heads, dim
    results = into[0].ctypes.data, into[1].ctypes.data
    _module().digest_scores((kept.ctypes.data, digests.ctypes.data), counts, results, level)


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of a C-contiguous buffer, continuing from ``crc``. The GIL is released."""
    return int(_module().crc32c(data, crc))


def read_all(data: Buffer) -> int:
    """Read a buffer on all threads and return the sum of its 64-bit words mod 2^64: the measure of read bandwidth."""
    return int(_module().read_all(data))


def read_blocks(addresses: torch.Tensor, block_bytes: int) -> int:
    """``read_all`` of the blocks of ``block_bytes`` at ``addresses`` (int64, on the CPU), in that order."""
    kept = addresses.contiguous()
    return int(_module().read_blocks(kept.data_ptr(), kept.numel(), block_bytes))


def copy_crc32c(target: Buffer, source: Buffer, crc: int = 0) -> int:
    """Copy ``source`` to the start of ``target`` and return the CRC-32C of what was copied, in one pass over memory.

    Both are C-contiguous, ``target`` writable and not smaller, and they do not overlap. The GIL is released.
    """
    return int(_module().copy_crc32c(target, source, crc))


def copy_slices_crc32c(
    targets: Sequence[Buffer], sources: Sequence[Buffer], lengths: tuple[int, int, int, int]
) -> bytes:
    """Copy the slices of many blocks, ``sources[i]`` to ``targets[i]``, and checksum what was written, in one pass.

    ``lengths`` is (slices, bytes of a slice, target stride, source stride). Returns the CRC-32C of each slice as a
    little-endian u32, block by block. Buffers as in ``copy_crc32c``, from the first slice to the last one's end at
    least; bytes between slices are left alone. The GIL is released, and large batches use all threads.
    """
    return bytes(_module().copy_slices_crc32c(targets, sources, lengths))


def copy_slices(targets: list[Buffer], sources: list[Buffer], lengths: tuple[int, int, int, int], threads: int) -> None:
    """Copy the slices of many blocks, ``sources[i]`` to ``targets[i]``; arguments as in ``copy_slices_crc32c``.

    Large copies are not left in the caches, where other work has its data; they use ``threads`` threads at most.
    """
    _module().copy_slices(targets, sources, lengths, threads)


def copy_pieces(targets: NDArray[np.int64], sources: NDArray[np.int64], piece_bytes: int, threads: int) -> None:
    """Copy pieces of ``piece_bytes`` from ``sources[i]`` to ``targets[i]``, which are addresses of this process.

    Both are flat and contiguous. Nothing here can check that the addresses are the caller's and live until the end.
    Large copies are not left in the caches; they use ``threads`` threads at most. The GIL is released.
    """
    for one in (targets, sources):
        if one.shape != targets.shape or one.ndim != 1 or one.dtype.str != "<i8" or not one.flags.c_contiguous:
            raise ValueError(f"addresses are {one.dtype} of shape {one.shape}; expected flat contiguous int64")
    _module().copy_pieces(targets.ctypes.data, sources.ctypes.data, len(targets), piece_bytes, threads)


def copy_variant(level: str | None = None) -> dict[str, CopyVariant]:
    """Say how copies are made, by ``COPY_KINDS``; ``level`` asks what another of ``LEVELS`` would take.

    The forms are timed at the first copy or call of this in a process, which takes some 10 ms, and then never again.
    """
    choices, _ = _module().copy_choices(level or "")
    return {
        kind: CopyVariant(kind, form, dict(speeds)) for kind, (form, speeds) in zip(COPY_KINDS, choices, strict=True)
    }


def copy_by(form: str, target: Buffer, source: Buffer, *, summed: bool, crc: int = 0, level: str | None = None) -> int:
    """Copy as ``copy_crc32c`` does, by one form whether it is the chosen one or not; 0 unless ``summed``.

    ValueError if the level has no such form. It is for tests and benchmarks.
    """
    return int(_module().copy_by(form, target, source, summed, crc, level or ""))
