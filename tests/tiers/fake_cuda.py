# ruff: noqa: N802 - the names are those of the runtime that is faked
"""A CUDA runtime whose device memory is a buffer of this process."""

from __future__ import annotations

import ctypes


class FakeRuntime:
    """Device memory is a ctypes buffer. ``fail`` names a call that answers an error."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail = ""
        self.memory = ctypes.create_string_buffer(0)
        self.registered: dict[int, int] = {}

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

    def cudaIpcGetMemHandle(self, handle, address) -> int:
        handle._obj.raw = bytes(range(64))
        return self._called("cudaIpcGetMemHandle")

    def cudaMemcpy(self, to, source, nbytes, kind) -> int:
        code = self._called("cudaMemcpy")
        if not code:
            ctypes.memmove(to, source, nbytes.value)
        return code

    def cudaHostRegister(self, address, nbytes, flags) -> int:
        self.registered[address.value] = nbytes.value
        return self._called("cudaHostRegister")

    def cudaHostUnregister(self, address) -> int:
        del self.registered[address.value]
        return self._called("cudaHostUnregister")
