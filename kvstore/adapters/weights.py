"""What names a model's weights, for engines that do not: part of a namespace, since others make other K and V."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")


def weights_of(model: str, revision: str | None) -> str:
    """Names the weights: a folder by the names, sizes and times of its files, all else by its name and revision."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or ''}"
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
