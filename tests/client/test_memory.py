"""A client can not write into the HOST arena, whatever it tries with the descriptor that it got."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import Unavailable
from kvstore.core.types import Area
from kvstore.v1 import session_pb2
from kvstore.wire.framing import PROTOCOL_VERSION, FrameDecoder, FrameKind, pack_frame

REFUSED = {errno.EPERM, errno.EACCES}


@pytest.fixture
def host(daemon):
    """The HOST arena's descriptor and size, taken by hand."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(daemon.socket))
        hello = session_pb2.Hello(protocol_version=PROTOCOL_VERSION, name="thief")
        connection.sendall(pack_frame(1, FrameKind.HELLO, hello.SerializeToString()))
        data, fds, _, _ = socket.recv_fds(connection, 65536, 8)
        frame = FrameDecoder().feed(data)[0]
        welcome = session_pb2.Welcome.FromString(frame.payload)
        position = [Area(arena.area) for arena in welcome.arenas].index(Area.HOST)
        yield fds[position], welcome.arenas[position].bytes
        for fd in fds:
            os.close(fd)


def refused(action):
    with pytest.raises(OSError) as caught:
        action()
    return caught.value.errno in REFUSED


def test_no_writable_mapping(host):
    fd, size = host
    assert refused(lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))


def test_no_writable_mapping_of_a_reopened_descriptor(host):
    fd, size = host
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        assert refused(lambda: mmap.mmap(again, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(again)


def test_no_write_calls(host):
    fd, _ = host
    assert refused(lambda: os.write(fd, b"x"))
    assert refused(lambda: os.pwrite(fd, b"x", 4096))


def test_no_change_of_size_and_no_holes(host):
    fd, size = host
    assert refused(lambda: os.ftruncate(fd, size // 2))
    assert refused(lambda: os.ftruncate(fd, 2 * size))
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch = 3
    done = libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(4096))
    assert done == -1
    assert ctypes.get_errno() in REFUSED


def test_no_mprotect_of_a_read_only_mapping(host):
    fd, size = host
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    done = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
    assert done == -1
    assert ctypes.get_errno() in REFUSED
    mapped.close()


def test_seals_can_not_be_undone(host):
    fd, _ = host
    get_seals, future_write = 1034, 16
    assert fcntl.fcntl(fd, get_seals) & future_write


STORE_A_BYTE = """
import ctypes, sys
from kvstore.client import Client, ClientOptions
from kvstore.core.types import Area
client = Client(sys.argv[1], ClientOptions(strict=True, buffer_bytes=4096))
view = client.memory(Area.HOST)
import numpy
address = numpy.frombuffer(view, numpy.uint8).ctypes.data
print("now", flush=True)
ctypes.memset(address, 1, 1)
print("survived", flush=True)
"""


def test_a_store_by_address_faults_in_the_clients_own_process(daemon):
    child = subprocess.run(
        [sys.executable, "-c", STORE_A_BYTE, str(daemon.socket)], check=False, capture_output=True, text=True
    )
    assert child.stdout.split() == ["now"]
    assert child.returncode == -signal.SIGSEGV
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=4096)) as client:
        assert client.memory(Area.HOST)[0] in range(256)


def test_views_are_what_they_may_be(daemon):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
        assert client.memory(Area.HOST).readonly
        # On shared memory DEVICE is read-only, too: a block is written in the buffer and copied at its commit.
        assert client.memory(Area.DEVICE).readonly
        assert not client.memory(Area.BUFFER).readonly
        assert len(client.memory(Area.BUFFER)) >= 1 << 20
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0)) as client, pytest.raises(Unavailable):
        client.memory(Area.HOST)
