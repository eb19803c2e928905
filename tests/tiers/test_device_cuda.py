"""The CUDA arena against a fake runtime whose device memory is host memory: calls, sizes, errors, bytes."""
# ruff: noqa: N802  the names are those of the runtime that is faked

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvstore.core.errors import TierError, Unavailable
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Codec
from kvstore.tiers import device_cuda
from kvstore.tiers.device_cuda import CudaDeviceArena
from kvstore.tiers.host import HostArena
from tests.tiers.fake_cuda import FakeRuntime

SPEC = NamespaceSpec(model="m", dtype="float16", layers=3, kv_heads=4, head_dim=16, block_tokens=8, codec="int8")
LAYOUT = BlockLayout.of(SPEC)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
def test_blocks_cross_and_come_back(codec):
    runtime = FakeRuntime()
    arena = CudaDeviceArena(1 << 20, runtime=runtime)
    offset, back = arena.allocate(LAYOUT.device_bytes), arena.allocate(LAYOUT.device_bytes)
    values = np.random.default_rng(1).standard_normal(3 * LAYOUT.raw_slice_stride // 2).astype(np.float16)
    ctypes.memmove(arena.address + offset, values.tobytes(), values.nbytes)
    out = memoryview(bytearray(LAYOUT.layers * LAYOUT.of_codec(codec)[1]))
    assert arena.encode(offset, LAYOUT, SPEC, codec, out) is codec
    arena.decode(back, LAYOUT, SPEC, codec, out)
    got = np.frombuffer(ctypes.string_at(arena.address + back, values.nbytes), np.float16)
    np.testing.assert_allclose(got, values, atol=0 if codec is Codec.RAW else 0.05)
    arena.free(offset, LAYOUT.device_bytes)
    assert arena.used_bytes == LAYOUT.device_bytes
    beside = arena.holes_beside(back, back + LAYOUT.device_bytes)
    assert sum(beside) == arena.capacity_bytes - LAYOUT.device_bytes
    assert arena.ipc_handle == bytes(range(64))
    arena.close()
    arena.close()
    assert runtime.calls.count("cudaFree") == 1


def test_nan_stays_raw_or_says_that_there_is_no_room():
    arena = CudaDeviceArena(1 << 20, runtime=FakeRuntime())
    offset = arena.allocate(LAYOUT.device_bytes)
    ctypes.memmove(arena.address + offset, np.float16(np.nan).tobytes(), 2)
    raw = memoryview(bytearray(LAYOUT.layers * LAYOUT.raw_slice_stride))
    assert arena.encode(offset, LAYOUT, SPEC, Codec.INT8, raw) is Codec.RAW
    with pytest.raises(TierError, match="do not fit"):
        arena.encode(offset, LAYOUT, SPEC, Codec.INT8, raw[: LAYOUT.layers * LAYOUT.slice_stride])


@pytest.mark.parametrize("name", ["cudaSetDevice", "cudaMalloc", "cudaIpcGetMemHandle"])
def test_errors_name_the_call(name):
    runtime = FakeRuntime()
    runtime.fail = name
    with pytest.raises(TierError, match=f"{name} answered CUDA error 2"):
        CudaDeviceArena(1 << 20, runtime=runtime)


def test_there_is_no_host_view_and_no_runtime_without_a_gpu(monkeypatch):
    arena = CudaDeviceArena(1 << 20, runtime=FakeRuntime())
    with pytest.raises(Unavailable, match="no host view"):
        arena.view(0, 1)
    monkeypatch.setattr(device_cuda.torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        device_cuda.load_runtime()


def test_host_memory_is_registered_and_let_go():
    runtime = FakeRuntime()
    arena = HostArena(4 << 20, pin=device_cuda.pin(runtime))
    assert list(runtime.registered.values()) == [arena.mapped_bytes]
    arena.close()
    assert runtime.registered == {}
    runtime.fail = "cudaHostRegister"
    arena = HostArena(4 << 20, pin=device_cuda.pin(runtime))
    assert any("cudaHostRegister answered 2" in warning for warning in arena.warnings)
    arena.close()


def test_a_block_has_reached_the_device_when_decode_returns():
    runtime = FakeRuntime()
    arena = CudaDeviceArena(1 << 20, runtime=runtime)
    arena.decode(0, LAYOUT, SPEC, Codec.RAW, memoryview(bytearray(LAYOUT.device_bytes)))
    assert runtime.calls[-2:] == ["cudaMemcpy", "cudaDeviceSynchronize"]


def test_an_allocation_that_can_not_be_shared_is_given_back():
    runtime = FakeRuntime()
    runtime.fail = "cudaIpcGetMemHandle"
    with pytest.raises(TierError):
        CudaDeviceArena(1 << 20, runtime=runtime)
    assert runtime.calls[-1] == "cudaFree"
