"""The converted SmolLM2 equals what transformers itself loads from the GGUF file, weights and tokens alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.paths import gguf_file, model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = (
    "def f(x):\n    return x ** 2  # 12345\n",
    "Grüße, 世界! \t\n\n x",
    "<|im_start|>user\nHi<|im_end|>\n",
    "it's 1000",
)


@pytest.fixture(scope="module")
def source() -> Path:
    return gguf_file()


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder()


def test_weights_are_equal_bit_for_bit(source: Path, folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for field in ("rope_parameters", "rms_norm_eps", "head_dim", "tie_word_embeddings", "vocab_size"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field


def test_tokens_are_equal(source: Path, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    ours = AutoTokenizer.from_pretrained(folder)
    source_text = Path(torch.nn.modules.module.__file__).read_text()[:20000]
    for text in (*TEXTS, source_text):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
