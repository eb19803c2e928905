"""Shared memory: what a client can and can not do with its descriptor, and what is left behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from kvstore.core.errors import InvalidArgument, TierError
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area, Codec
from kvstore.tiers import memfd
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import BufferArena, HostArena, MemfdArena

SPEC = NamespaceSpec(model="m", dtype="float16", layers=3, kv_heads=4, head_dim=16, block_tokens=8, codec="int8")
LAYOUT = BlockLayout.of(SPEC)


@pytest.fixture
def host():
    arena = HostArena(4 << 20)
    yield arena
    arena.close()


def test_a_client_can_map_host_only_to_read(host):
    host.view(0, 5)[:] = b"bytes"
    with mmap.mmap(host.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert mapped[:5] == b"bytes"
        host.view(0, 5)[:] = b"later"
        assert mapped[:5] == b"later"
    for attempt in (
        lambda: mmap.mmap(host.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.write(host.fd, b"x"),
        lambda: os.pwrite(host.fd, b"x", 0),
        lambda: os.ftruncate(host.fd, 0),
        lambda: os.ftruncate(host.fd, 8 << 20),
        lambda: os.posix_fallocate(host.fd, 0, 16 << 20),
    ):
        with pytest.raises(OSError, match=r"not permitted|denied|Read-only"):
            attempt()
    assert bytes(host.view(0, 5)) == b"later"


WRITER = """
import ctypes, mmap, sys
mapped = mmap.mmap(int(sys.argv[1]), 4096, mmap.MAP_SHARED, mmap.PROT_READ)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
address = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, int(sys.argv[1]), 0)
if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3) == 0:
    print("mprotect made it writable")
ctypes.memset(ctypes.c_void_p(address), 65, 1)
print("wrote")
"""


def test_a_client_that_writes_anyway_faults_alone(host):
    host.view(0, 1)[:] = b"0"
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(host.fd)], pass_fds=[host.fd], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == ""
    assert bytes(host.view(0, 1)) == b"0"


def test_buffers_are_writable_and_of_fixed_size():
    buffer = BufferArena(1 << 16)
    with mmap.mmap(buffer.fd, 1 << 16) as mapped:
        mapped[:3] = b"abc"
        assert bytes(buffer.view(0, 3)) == b"abc"
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    buffer.close()


def test_closing_frees_the_memory_and_is_idempotent():
    before = set(os.listdir("/dev/shm"))
    arena = HostArena(2 << 20)
    assert set(os.listdir("/dev/shm")) == before
    fd = arena.fd
    assert arena.mapped_bytes >= (2 << 20) + 8 * (2 << 20) // 4096, "the versions of its pages lie behind it"
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_closing_under_a_view_leaves_the_view_readable():
    arena = BufferArena(1 << 16)
    view = arena.view(0, 4)
    view[:] = b"data"
    arena.close()
    assert bytes(view) == b"data"


def test_plain_pages_are_said_loudly_with_the_command(monkeypatch, tmp_path):
    mode = tmp_path / "shmem_enabled"
    monkeypatch.setattr(memfd, "SHMEM_ENABLED", mode)
    monkeypatch.setattr(memfd, "_hugetlb", lambda name, size: None)
    mode.write_text("always within_size advise [never] deny force\n")
    arena = HostArena(5 << 20)
    assert arena.backing == "memfd, 4 KiB pages"
    (warning,) = arena.warnings
    assert "echo advise | sudo tee" in warning
    assert "vm.nr_hugepages by 3" in warning
    arena.close()
    mode.write_text("always within_size [advise] never deny force\n")
    arena = HostArena(4 << 20)
    assert (arena.backing, arena.warnings) == ("memfd, transparent 2 MiB pages", ())
    arena.close()


def test_hugetlb_is_tried_first(monkeypatch):
    plain = memfd.create("plain", 4 << 20)
    made = memfd.SharedMemory(plain.fd, plain.map, plain.nbytes, "memfd, 2 MiB hugetlb pages")
    monkeypatch.setattr(memfd, "_hugetlb", lambda name, size: made)
    arena = MemfdArena("x", 4 << 20, Area.HOST)
    assert arena.backing == "memfd, 2 MiB hugetlb pages"
    arena.close()


def test_pinning_is_undone_at_the_end_and_its_failure_is_a_warning():
    calls = []

    def pin(address, nbytes):
        calls.append(("pin", nbytes))
        return lambda: calls.append("unpin")

    arena = HostArena(4 << 20, pin=pin)
    assert arena.backing.endswith("pinned")
    arena.close()
    arena.close()
    assert calls == [("pin", arena.mapped_bytes), "unpin"]

    def refuse(address, nbytes):
        raise OSError("cudaHostRegister: out of memory")

    arena = HostArena(4 << 20, pin=refuse)
    assert any("could not be pinned" in w and ("ulimit -l" in w or "container" in w) for w in arena.warnings)
    arena.close()


@pytest.mark.parametrize("nbytes", [0, -1, 4095, 4096 << 33])
def test_sizes_are_checked(nbytes):
    with pytest.raises(InvalidArgument, match="bytes"):
        HostArena(nbytes)


def test_views_stay_inside(host):
    for offset, nbytes in ((-1, 4), (0, -1), (4 << 20, 1), (0, (4 << 20) + 1)):
        with pytest.raises(ValueError, match="outside"):
            host.view(offset, nbytes)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
def test_blocks_cross_to_the_stored_form_and_back(codec):
    arena = MemfdDeviceArena(1 << 20)
    offset, back = arena.allocate(LAYOUT.device_bytes), arena.allocate(LAYOUT.device_bytes)
    values = np.random.default_rng(1).standard_normal((3, LAYOUT.raw_slice_bytes // 2)).astype(np.float16)
    for layer in range(3):
        arena.view(offset + layer * LAYOUT.raw_slice_stride, LAYOUT.raw_slice_bytes)[:] = values[layer].tobytes()
    out = memoryview(bytearray(LAYOUT.layers * LAYOUT.of_codec(codec)[1]))
    assert arena.encode(offset, LAYOUT, SPEC, codec, out) is codec
    arena.decode(back, LAYOUT, SPEC, codec, out)
    for layer in range(3):
        data = arena.view(back + layer * LAYOUT.raw_slice_stride, LAYOUT.raw_slice_bytes)
        np.testing.assert_allclose(
            np.frombuffer(data, np.float16), values[layer], atol=0 if codec is Codec.RAW else 0.05
        )
    del data
    arena.close()


def test_blocks_with_nan_stay_raw_and_say_when_there_is_no_room():
    arena = MemfdDeviceArena(1 << 20)
    offset = arena.allocate(LAYOUT.device_bytes)
    arena.view(offset, 2)[:] = np.float16(np.nan).tobytes()
    raw = memoryview(bytearray(LAYOUT.layers * LAYOUT.raw_slice_stride))
    assert arena.encode(offset, LAYOUT, SPEC, Codec.INT8, raw) is Codec.RAW
    assert bytes(raw) == bytes(arena.view(offset, len(raw)))
    with pytest.raises(TierError, match="do not fit"):
        arena.encode(offset, LAYOUT, SPEC, Codec.INT8, raw[: 3 * LAYOUT.slice_stride])
    arena.close()
