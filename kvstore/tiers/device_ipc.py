"""The other side of the CUDA arena: how an engine's process maps DEVICE, and reads HOST from its GPU.

**Not run on hardware by this project's own tests**, like ``device_cuda``: written to the CUDA runtime's documentation
and checked against a fake runtime only (tests/tiers).

Both mappings are undone when the last user of them is gone, after the device has finished its work; at the end of the
process the driver does it.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch

from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.tiers.device_cuda import IPC_HANDLE_BYTES, load_runtime

log = logging.getLogger(__name__)

_LAZY_PEER_ACCESS: Final = 1
_REGISTER_PORTABLE: Final = 1
_REGISTER_MAPPED: Final = 2
_REGISTER_READ_ONLY: Final = 8


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which the runtime takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class Runtime(Protocol):
    """The calls of the CUDA runtime that this module makes; each returns an error code, 0 for success."""

    def cudaSetDevice(self, device: int) -> int: ...  # noqa: N802, D102
    def cudaDeviceSynchronize(self) -> int: ...  # noqa: N802, D102
    def cudaIpcOpenMemHandle(self, address: object, handle: IpcHandle, flags: int) -> int: ...  # noqa: N802, D102
    def cudaIpcCloseMemHandle(self, address: object) -> int: ...  # noqa: N802, D102
    def cudaHostRegister(self, address: object, nbytes: object, flags: int) -> int: ...  # noqa: N802, D102
    def cudaHostUnregister(self, address: object) -> int: ...  # noqa: N802, D102
    def cudaHostGetDevicePointer(self, address: object, host: object, flags: int) -> int: ...  # noqa: N802, D102


class DeviceBytes:
    """Bytes at a device address, for torch's ``as_tensor``; the tensor made of it keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def map_device(
    handle: bytes,
    nbytes: int,
    device: int,
    *,
    runtime: Runtime | None = None,
    as_tensor: Callable[..., torch.Tensor] = torch.as_tensor,
) -> torch.Tensor:
    """The DEVICE arena of another process as a flat, writable uint8 tensor [nbytes] on CUDA device ``device``.

    ``handle`` is the arena's IPC handle. The mapping lasts as long as the tensor or a view of it. Raises
    InvalidArgument for a handle of another length, Unavailable without CUDA or if the driver refuses.
    """
    if len(handle) != IPC_HANDLE_BYTES:
        raise InvalidArgument("cuda_ipc_handle", f"{len(handle)} bytes", f"{IPC_HANDLE_BYTES} bytes")
    cuda: Runtime = load_runtime() if runtime is None else runtime  # type: ignore[assignment]
    address = ctypes.c_void_p()
    _check("cudaSetDevice", cuda.cudaSetDevice(device))
    opened = cuda.cudaIpcOpenMemHandle(ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    _check("cudaIpcOpenMemHandle", opened)
    mapped = DeviceBytes(address.value or 0, nbytes)
    weakref.finalize(mapped, _undo, cuda, device, "cudaIpcCloseMemHandle", address).atexit = False
    return as_tensor(mapped, device=f"cuda:{device}")


class PinnedHost:
    """The HOST arena as the GPU reads it: this process's own mapping, registered with CUDA.

    ``address`` is where kernels find its first byte; it holds as long as this object. The memory stays mapped until
    then. Raises Unavailable where the driver refuses, naming the call.
    """

    def __init__(self, memory: memoryview, device: int, *, runtime: Runtime | None = None) -> None:
        cuda: Runtime = load_runtime() if runtime is None else runtime  # type: ignore[assignment]
        data = np.frombuffer(memory, np.uint8)
        host, address = ctypes.c_void_p(int(data.ctypes.data)), ctypes.c_void_p()
        flags = _REGISTER_PORTABLE | _REGISTER_MAPPED | (_REGISTER_READ_ONLY if memory.readonly else 0)
        _check("cudaSetDevice", cuda.cudaSetDevice(device))
        _check("cudaHostRegister", cuda.cudaHostRegister(host, ctypes.c_size_t(data.nbytes), flags))
        # ``data`` goes with the call, so that the mapping is not undone before it was unregistered.
        weakref.finalize(self, _undo, cuda, device, "cudaHostUnregister", host, data).atexit = False
        _check("cudaHostGetDevicePointer", cuda.cudaHostGetDevicePointer(ctypes.byref(address), host, 0))
        self.address = address.value or 0


def _undo(cuda: Runtime, device: int, name: str, address: ctypes.c_void_p, _memory: object = None) -> None:
    """End a mapping. A failure is told only: whoever used the mapping is gone."""
    for call in (lambda: cuda.cudaSetDevice(device), cuda.cudaDeviceSynchronize, lambda: getattr(cuda, name)(address)):
        code = call()
        if code:
            log.warning("%s of GPU memory: the CUDA runtime answered %d", name, code)


def _check(name: str, code: int) -> None:
    if code:
        raise Unavailable(f"{name} answered CUDA error {code}", field=name, value=code)
