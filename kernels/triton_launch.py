"""What every launch of a Triton kernel needs to know about where it runs."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

__all__ = ["backend", "interpreted", "multiprocessors", "on_device_of", "require_device"]


@triton.jit
def _probe(pointer):
    tl.store(pointer, 0)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels: settled when they were imported (``TRITON_INTERPRET=1``)."""
    return not isinstance(_probe, triton.JITFunction)


def backend() -> str:
    """Triton's name for the kind of GPU that this torch is built for: "cuda" or "hip"."""
    return "hip" if torch.version.hip else "cuda"


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def require_device(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is where Triton kernels can reach it."""
    if not tensor.is_cuda and not interpreted():
        raise ValueError(f"{name} is on {tensor.device}; Triton kernels need it on a GPU (or Triton's interpreter)")


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the device of ``tensor`` current: Triton launches on the current device, not on that of its arguments."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
