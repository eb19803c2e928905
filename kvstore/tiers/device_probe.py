"""Which kind of DEVICE arena this machine can have, and why.

torch takes seconds to load, so it is asked only where there is the device node of an NVIDIA GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument, Unavailable

_DEVICES: Final = Path("/dev")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """``kind`` is "shared" or "cuda", ``reason`` a clause for people; ``gpu_unused``: a GPU is here, but of no use."""

    kind: str
    reason: str
    gpu_unused: bool = False


def cuda_devices() -> int:
    """How many CUDA devices torch sees. Loads torch; Unavailable, with the reason, if it can use none."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Unavailable(f"torch can not be imported ({error})") from error
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "look at nvidia-smi"
        raise Unavailable(f"torch.cuda.is_available() is False ({built})")
    return int(torch.cuda.device_count())


def choose_device(
    wanted: str, index: int, *, devices: Path = _DEVICES, count: Callable[[], int] = cuda_devices
) -> DeviceChoice:
    """Settle ``device_kind``. Raises InvalidArgument if "cuda" was asked for and can not be had."""
    if wanted == "shared":
        return DeviceChoice("shared", "device_kind is shared")
    gpu = any(devices.glob("nvidia[0-9]*"))
    trouble = _trouble(index, count) if gpu else f"there is no NVIDIA device node {devices}/nvidia0"
    if not trouble:
        return DeviceChoice("cuda", f"torch can use CUDA device {index}")
    if wanted == "cuda":
        raise InvalidArgument("device_kind", "cuda", f"auto or shared, since {trouble}")
    return DeviceChoice("shared", trouble, gpu_unused=gpu)


def _trouble(index: int, count: Callable[[], int]) -> str:
    """Why the device can not be used; empty if it can."""
    try:
        found = count()
    except Unavailable as error:
        return error.message
    return "" if index < found else f"device_index is {index} and torch sees {found} CUDA devices"
