"""Anonymous shared memory: memfds on the largest pages to be had, faulted in, locked against growth and writers.

Order of pages: a hugetlb memfd (reserved 2 MiB pages), a memfd with transparent huge pages where the kernel's
``shmem_enabled`` lets it, plain 4 KiB pages. No name is left anywhere: the memory goes with its last descriptor
and mapping.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import Unavailable
from kvstore.core.namespace import PAGE_BYTES
from kvstore.kernels.layout import align_up

HUGE_PAGE: Final = 2 << 20
SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_MFD_CLOEXEC: Final = 1
_MFD_ALLOW_SEALING: Final = 2
_MFD_HUGETLB: Final = 4
_MFD_HUGE_2MB: Final = 21 << 26
_MADV_POPULATE_WRITE: Final = 23
_F_ADD_SEALS: Final = 1033
_SEAL_SHRINK: Final = 2
_SEAL_GROW: Final = 4
_SEAL_FUTURE_WRITE: Final = 16
_MAP_NORESERVE: Final = 0x4000
"""Not in every version of ``mmap``."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A memfd and this process's writable mapping of it, both owned by the holder."""

    fd: int
    map: mmap.mmap
    nbytes: int
    backing: str
    warnings: tuple[str, ...] = ()


def create(name: str, nbytes: int, *, populate: bool = True) -> SharedMemory:
    """Make ``nbytes`` of shared memory, rounded up to whole pages, on the best pages and fault it in.

    ``name`` shows in /proc/PID/maps only. Raises Unavailable if the machine has no such memory left.
    """
    size = max(nbytes, 1)
    attempts: list[Callable[[], SharedMemory | None]] = [
        lambda: _hugetlb(name, align_up(size, HUGE_PAGE)),
        lambda: _plain(name, align_up(size, PAGE_BYTES), populate),
    ]
    for attempt in attempts:
        memory = attempt()
        if memory is not None:
            return memory
    raise Unavailable(f"no {size} bytes of shared memory for {name}: mapping was refused")


def seal_size(memory: SharedMemory) -> None:
    """Keep anyone from growing or shrinking the memory."""
    fcntl.fcntl(memory.fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)


def seal_read_only(memory: SharedMemory) -> None:
    """Also keep anyone from mapping it writable from now on; this process's mapping stays writable."""
    fcntl.fcntl(memory.fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE)


def release(memory: SharedMemory) -> bool:
    """Close descriptor and mapping; False if a view of the mapping is still alive, which then unmaps it as it goes."""
    os.close(memory.fd)
    try:
        memory.map.close()
    except BufferError:
        return False
    return True


def _hugetlb(name: str, size: int) -> SharedMemory | None:
    try:
        fd = os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING | _MFD_HUGETLB | _MFD_HUGE_2MB)
    except OSError:
        return None
    try:
        os.ftruncate(fd, size)
        # hugetlb pages are reserved at mmap: it fails here, not with SIGBUS at the first touch.
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        os.close(fd)
        return None
    if _populate(mapped) not in (0, errno.EINVAL):
        mapped.close()
        os.close(fd)
        return None
    return SharedMemory(fd, mapped, size, "memfd, 2 MiB hugetlb pages")


def _plain(name: str, size: int, populate: bool) -> SharedMemory | None:
    fd = os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        os.close(fd)
        return None
    huge = _shmem_mode() in ("always", "within_size", "advise", "force")
    if huge:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    failed = _populate(mapped) if populate else 0
    if failed in (errno.ENOMEM, errno.EFAULT):
        mapped.close()
        os.close(fd)
        raise Unavailable(f"no {size} bytes of shared memory for {name}: {os.strerror(failed)}")
    if huge:
        return SharedMemory(fd, mapped, size, "memfd, transparent 2 MiB pages")
    pages = -(-size // HUGE_PAGE)
    return SharedMemory(
        fd,
        mapped,
        size,
        "memfd, 4 KiB pages",
        (
            f"{name} is on 4 KiB pages, which halve the speed of direct disk reads: "
            f"echo advise | sudo tee {SHMEM_ENABLED}, or raise vm.nr_hugepages by {pages}, then restart",
        ),
    )


def _populate(mapped: mmap.mmap) -> int:
    """Fault every page in for writing; 0 or the errno. EINVAL (before Linux 5.14) leaves it to first touch."""
    libc = ctypes.CDLL(None, use_errno=True)
    anchor = ctypes.c_char.from_buffer(mapped)
    try:
        done = libc.madvise(
            ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), _MADV_POPULATE_WRITE
        )
        return 0 if done == 0 else ctypes.get_errno()
    finally:
        del anchor


def _shmem_mode() -> str:
    try:
        text = SHMEM_ENABLED.read_text()
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0]
