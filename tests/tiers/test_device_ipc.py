"""How an engine maps a CUDA arena and reads HOST from its GPU, against a fake runtime: calls, errors, lifetime."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref

import pytest
import torch

from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.tiers.device_cuda import CudaDeviceArena
from kvstore.tiers.device_ipc import DeviceBytes, PinnedHost, map_device
from tests.tiers.fake_cuda import FakeRuntime, tensor_of


@pytest.fixture
def runtime():
    return FakeRuntime()


def test_the_tensor_is_the_daemons_memory_and_ends_its_mapping(runtime):
    arena = CudaDeviceArena(1 << 20, device=1, runtime=runtime)
    runtime.calls.clear()
    tensor = map_device(arena.ipc_handle, arena.capacity_bytes, 1, runtime=runtime, as_tensor=tensor_of)
    assert runtime.calls == ["cudaSetDevice", "cudaIpcOpenMemHandle"]
    assert (tensor.dtype, tuple(tensor.shape), tensor.data_ptr()) == (torch.uint8, (1 << 20,), arena.address)
    tensor[7] = 42
    assert ctypes.string_at(arena.address + 7, 1) == b"*"
    part = tensor[4096:].view(torch.float32)
    del tensor
    gc.collect()
    assert "cudaIpcCloseMemHandle" not in runtime.calls
    del part
    gc.collect()
    assert runtime.calls[2:] == ["cudaSetDevice", "cudaDeviceSynchronize", "cudaIpcCloseMemHandle"]


def test_torch_is_told_a_flat_stretch_of_bytes():
    assert DeviceBytes(4096, 100).__cuda_array_interface__ == {
        "shape": (100,), "typestr": "|u1", "data": (4096, False), "version": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["cudaSetDevice", "cudaIpcOpenMemHandle"])
def test_a_refused_handle_names_the_call(runtime, name):
    runtime.fail = name
    with pytest.raises(Unavailable, match=f"{name} answered CUDA error 2"):
        map_device(bytes(range(64)), 4096, 0, runtime=runtime, as_tensor=tensor_of)


def test_a_handle_of_another_length_is_refused(runtime):
    with pytest.raises(InvalidArgument) as caught:
        map_device(bytes(63), 4096, 0, runtime=runtime)
    assert (caught.value.field, runtime.calls) == ("cuda_ipc_handle", [])


@pytest.mark.parametrize(("readonly", "flags"), [(True, 1 | 2 | 8), (False, 1 | 2)])
def test_host_is_registered_in_place_and_found_at_the_gpus_address(runtime, readonly, flags):
    runtime.host_shift = 1 << 40
    mapped = mmap.mmap(-1, 8192)
    alive, memory = weakref.ref(mapped), memoryview(mapped)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pinned = PinnedHost(memory.toreadonly() if readonly else memory, 3, runtime=runtime)
    assert pinned.address == address + (1 << 40)
    assert (runtime.registered, runtime.flags) == ({address: 8192}, flags)
    runtime.calls.clear()
    del mapped, memory
    gc.collect()
    assert alive() is not None
    del pinned
    gc.collect()
    assert runtime.calls == ["cudaSetDevice", "cudaDeviceSynchronize", "cudaHostUnregister"]
    assert runtime.registered == {}


@pytest.mark.parametrize("name", ["cudaHostRegister", "cudaHostGetDevicePointer"])
def test_a_refused_registration_leaves_nothing(runtime, name):
    runtime.fail = name
    with pytest.raises(Unavailable, match=f"{name} answered CUDA error 2"):
        PinnedHost(memoryview(bytearray(4096)), 0, runtime=runtime)
    gc.collect()
    assert runtime.registered == {}


def test_an_end_that_fails_is_told(runtime, caplog):
    pinned = PinnedHost(memoryview(bytearray(4096)), 0, runtime=runtime)
    runtime.fail = "cudaHostUnregister"
    del pinned
    gc.collect()
    assert "cudaHostUnregister of GPU memory: the CUDA runtime answered 2" in caplog.text
