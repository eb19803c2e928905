"""Where the weights of SmolLM2 lie, or a skip that says how to fetch them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".cache" / "models"


def model_folder() -> Path:
    """The converted SmolLM2 folder; skips the test where it was not fetched."""
    folder = MODELS / "smollm2"
    if not (folder / "source.json").is_file():
        pytest.skip(f"{folder} is absent; run: python -m kvstore.tools.fetch_model {ROOT}")
    return folder


def gguf_file() -> Path:
    """The GGUF file that the folder came from; skips the test where it was not kept."""
    found = sorted((MODELS / "gguf").glob("*.gguf"))
    if not found:
        pytest.skip(f"no GGUF file in {MODELS / 'gguf'}; run: python -m kvstore.tools.fetch_model {ROOT}")
    return found[0]
