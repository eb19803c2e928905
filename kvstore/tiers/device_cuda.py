"""The DEVICE tier on a GPU: one CUDA allocation owned by the daemon, mapped by engines through CUDA IPC.

**Not run on hardware by this project's own tests**, which have no GPU: allocation, the IPC handle, pinning and the
copies were written to the CUDA runtime's documentation and checked against a fake runtime only (tests/tiers).

The runtime is reached through ctypes, since the IPC handle is wanted as 64 plain bytes and the allocation must not
come from torch's caching allocator (whose blocks share one handle). int8 blocks are coded by the kernels of
``kvstore.tiers.coding`` on the host side, out of a staging buffer.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import torch

from kvstore.core.errors import TierError, Unavailable
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area, Codec
from kvstore.tiers.arena import RangeAllocator
from kvstore.tiers.base import DeviceArena
from kvstore.tiers.coding import decode_block, encode_block
from kvstore.tiers.versions import NO_VERSIONS

IPC_HANDLE_BYTES: Final = 64

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2
_REGISTER_PORTABLE: Final = 1


class Runtime(Protocol):
    """The calls of the CUDA runtime that this module makes; each returns an error code, 0 for success."""

    def cudaSetDevice(self, device: int) -> int: ...  # noqa: N802, D102
    def cudaMalloc(self, address: object, nbytes: object) -> int: ...  # noqa: N802, D102
    def cudaFree(self, address: object) -> int: ...  # noqa: N802, D102
    def cudaDeviceSynchronize(self) -> int: ...  # noqa: N802, D102
    def cudaIpcGetMemHandle(self, handle: object, address: object) -> int: ...  # noqa: N802, D102
    def cudaMemcpy(self, to: object, source: object, nbytes: object, kind: int) -> int: ...  # noqa: N802, D102
    def cudaHostRegister(self, address: object, nbytes: object, flags: int) -> int: ...  # noqa: N802, D102
    def cudaHostUnregister(self, address: object) -> int: ...  # noqa: N802, D102


def load_runtime() -> Runtime:
    """The CUDA runtime that torch has loaded into this process. Raises Unavailable without one."""
    if not torch.cuda.is_available():
        raise Unavailable("no CUDA device is available to torch")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    version = (torch.version.cuda or "12").partition(".")[0]
    for name in (None, f"libcudart.so.{version}", "libcudart.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "cudaIpcGetMemHandle"):
            return library
    raise Unavailable("the CUDA runtime library (libcudart) was not found in this process")


def pin(runtime: Runtime) -> Callable[[int, int], Callable[[], None]]:
    """What ``host.HostArena`` takes to register its memory with CUDA."""

    def register(address: int, nbytes: int) -> Callable[[], None]:
        code = runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _REGISTER_PORTABLE)
        if code:
            raise OSError(f"cudaHostRegister answered {code}")
        return lambda: _unregister(runtime, address)

    return register


def _unregister(runtime: Runtime, address: int) -> None:
    code = runtime.cudaHostUnregister(ctypes.c_void_p(address))
    if code:
        raise TierError(f"cudaHostUnregister answered {code}")


class CudaDeviceArena:
    """DEVICE on one GPU; meets ``base.DeviceArena``. ``ipc_handle`` is what an engine opens to map it."""

    area = Area.DEVICE
    kind = "cuda-ipc"
    client_writable = True
    """CUDA has no read-only mapping for other processes: see docs/security.md."""

    def __init__(self, nbytes: int, *, device: int = 0, runtime: Runtime | None = None) -> None:
        self._runtime = load_runtime() if runtime is None else runtime
        self.device = device
        self.capacity_bytes = nbytes // 4096 * 4096
        self.backing = f"CUDA device {device}, IPC"
        self.warnings: tuple[str, ...] = ()
        self.versions = NO_VERSIONS
        self._lock = threading.Lock()
        """Guards the staging buffer, which grows to the largest block."""
        self._staging = bytearray()
        self._ranges = RangeAllocator(self.capacity_bytes)
        address = ctypes.c_void_p()
        self._call("cudaSetDevice", self._runtime.cudaSetDevice(device))
        self._call("cudaMalloc", self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(self.capacity_bytes)))
        self._address = address.value or 0
        handle = (ctypes.c_char * IPC_HANDLE_BYTES)()
        try:
            self._call("cudaIpcGetMemHandle", self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        except TierError:
            self.close()
            raise
        self.ipc_handle = bytes(handle.raw)

    @property
    def address(self) -> int:
        """Device address of the first byte in this process."""
        return self._address

    @property
    def used_bytes(self) -> int:
        """Bytes of ranges handed out, rounding included."""
        return self._ranges.used

    def allocate(self, nbytes: int) -> int | None:
        """See ``base.Arena.allocate``."""
        return self._ranges.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """See ``base.Arena.free``."""
        self._ranges.free(offset, nbytes)

    def holes_beside(self, begin: int, end: int) -> tuple[int, int]:
        """See ``base.Arena.holes_beside``."""
        return self._ranges.holes_beside(begin, end)

    @property
    def fragmentation(self) -> float:
        """See ``base.Arena.fragmentation``."""
        return self._ranges.fragmentation

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A GPU's memory has no bytes for the CPU: raises Unavailable."""
        raise Unavailable("the DEVICE arena is on a GPU and has no host view", field="area", value="DEVICE")

    def encode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, out: memoryview) -> Codec:
        """See ``base.DeviceArena.encode``."""
        nbytes = layout.units_bytes(Codec.RAW)
        with self._lock:
            staged = self._staged(nbytes)
            self._copy(staged, self._address + offset, _DEVICE_TO_HOST)
            if codec is not Codec.RAW and encode_block(staged, out, layout, spec.geometry, codec):
                return codec
            if len(out) < nbytes:
                raise TierError(f"{nbytes} bytes do not fit into {len(out)}")
            out[:nbytes] = staged
            return Codec.RAW

    def decode(self, offset: int, layout: BlockLayout, spec: NamespaceSpec, codec: Codec, source: memoryview) -> None:
        """See ``base.DeviceArena.decode``."""
        nbytes = layout.units_bytes(Codec.RAW)
        with self._lock:
            staged = self._staged(nbytes)
            if codec is not Codec.RAW:
                decode_block(source, staged, layout, spec.geometry, codec)
            else:
                staged[:] = source[:nbytes]
            self._copy(staged, self._address + offset, _HOST_TO_DEVICE)

    def read(self, offset: int, out: memoryview) -> None:
        """See ``base.DeviceArena.read``."""
        with self._lock:
            staged = self._staged(len(out))
            self._copy(staged, self._address + offset, _DEVICE_TO_HOST)
            out[:] = staged

    def write(self, offset: int, source: memoryview) -> None:
        """See ``base.DeviceArena.write``."""
        with self._lock:
            staged = self._staged(len(source))
            staged[:] = source
            self._copy(staged, self._address + offset, _HOST_TO_DEVICE)

    def close(self) -> None:
        """Free the allocation. Idempotent. Engines that still map it must have closed their handles before."""
        if self._address:
            address, self._address = self._address, 0
            self._call("cudaFree", self._runtime.cudaFree(ctypes.c_void_p(address)))

    def _staged(self, nbytes: int) -> memoryview:
        if len(self._staging) < nbytes:
            self._staging = bytearray(nbytes)
        return memoryview(self._staging)[:nbytes]

    def _copy(self, staged: memoryview, device_address: int, kind: int) -> None:
        host = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(staged)))
        device = ctypes.c_void_p(device_address)
        to, source = (device, host) if kind == _HOST_TO_DEVICE else (host, device)
        self._call("cudaSetDevice", self._runtime.cudaSetDevice(self.device))
        self._call("cudaMemcpy", self._runtime.cudaMemcpy(to, source, ctypes.c_size_t(len(staged)), kind))
        # A copy from pageable memory may return before it has reached the device, and its reader is another process.
        self._call("cudaDeviceSynchronize", self._runtime.cudaDeviceSynchronize())

    def _call(self, name: str, code: int) -> None:
        if code:
            raise TierError(f"{name} answered CUDA error {code}", field=name, value=code)


if TYPE_CHECKING:

    def _meets(arena: CudaDeviceArena) -> DeviceArena:
        return arena
