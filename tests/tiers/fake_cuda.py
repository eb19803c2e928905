# ruff: noqa: N802 - the names are those of the runtime that is faked
"""A CUDA runtime whose device memory is a buffer of this process."""

from __future__ import annotations

import ctypes

import torch


class FakeRuntime:
    """Device memory is a ctypes buffer. ``fail`` names a call that answers an error."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail = ""
        self.memory = ctypes.create_string_buffer(0)
        self.registered: dict[int, int] = {}
        self.flags = 0
        self.host_shift = 0

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return 2 if name == self.fail else 0

    def cudaSetDevice(self, device: int) -> int:
        return self._called("cudaSetDevice")

    def cudaMalloc(self, address, nbytes) -> int:
        self.memory = ctypes.create_string_buffer(nbytes.value)
        address._obj.value = ctypes.addressof(self.memory)
        return self._called("cudaMalloc")

    def cudaFree(self, address) -> int:
        return self._called("cudaFree")

    def cudaDeviceSynchronize(self) -> int:
        return self._called("cudaDeviceSynchronize")

    def cudaIpcOpenMemHandle(self, address, handle, flags) -> int:
        code = self._called("cudaIpcOpenMemHandle")
        if not code:
            assert (bytes(handle), flags) == (bytes(range(64)), 1)
            address._obj.value = ctypes.addressof(self.memory)
        return code

    def cudaIpcCloseMemHandle(self, address) -> int:
        assert address.value == ctypes.addressof(self.memory)
        return self._called("cudaIpcCloseMemHandle")

    def cudaIpcGetMemHandle(self, handle, address) -> int:
        handle._obj.raw = bytes(range(64))
        return self._called("cudaIpcGetMemHandle")

    def cudaMemcpy(self, to, source, nbytes, kind) -> int:
        code = self._called("cudaMemcpy")
        if not code:
            ctypes.memmove(to, source, nbytes.value)
        return code

    def cudaHostRegister(self, address, nbytes, flags) -> int:
        code = self._called("cudaHostRegister")
        if not code:
            self.registered[address.value] = nbytes.value
            self.flags = flags
        return code

    def cudaHostGetDevicePointer(self, address, host, flags) -> int:
        assert flags == 0
        address._obj.value = host.value + self.host_shift
        return self._called("cudaHostGetDevicePointer")

    def cudaHostUnregister(self, address) -> int:
        del self.registered[address.value]
        return self._called("cudaHostUnregister")


def tensor_of(mapped, *, device):
    """What torch.as_tensor does for memory of a device, on the fake one: the tensor keeps ``mapped`` alive."""
    interface = mapped.__cuda_array_interface__
    (nbytes,) = interface["shape"]
    buffer = (ctypes.c_ubyte * nbytes).from_address(interface["data"][0])
    buffer.owner = mapped
    return torch.frombuffer(buffer, dtype=torch.uint8)
