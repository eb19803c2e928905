"""Which weights these are: the same bytes have one name wherever they lie, and a change is never missed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvstore.core.decoders import UnsupportedModel
from kvstore.engine import digests
from kvstore.engine.weights import identity_of, load_model
from tests.engine.families import build_pair
from tests.engine.test_gguf import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_pair("llama").reference.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to be hashed, in order; all files count as settled."""
    names: list[str] = []
    real = digests.sha256_of

    def note(path: Path) -> str:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(digests, "sha256_of", note)
    monkeypatch.setattr(digests, "SETTLED_S", -1.0)
    return names


def test_the_same_weights_elsewhere_are_the_same_model(folder: Path) -> None:
    other = shutil.copytree(folder, folder.parent / "elsewhere" / "named otherwise")
    assert load_model(other).spec.namespace_id == load_model(folder).spec.namespace_id


def test_a_gguf_file_without_a_name_is_named_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "one.gguf", tmp_path / "b" / "two.gguf"):
        write_gguf(path, "llama", named=False)
    specs = {load_model(path).spec.namespace_id for path in (tmp_path / "one.gguf", tmp_path / "b" / "two.gguf")}
    assert len(specs) == 1


def test_a_second_start_reads_no_weights_to_name_them(folder: Path, hashed: list[str]) -> None:
    found = identity_of(folder)
    assert identity_of(folder) == found
    assert hashed == ["model.safetensors"]


def test_a_change_is_seen_even_where_size_and_time_are_kept(folder: Path, hashed: list[str]) -> None:
    found, path = identity_of(folder), folder / "model.safetensors"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert identity_of(folder) != found
    assert len(hashed) == 2


def test_what_was_written_just_now_is_not_remembered(folder: Path, hashed: list[str], monkeypatch) -> None:
    monkeypatch.setattr(digests, "SETTLED_S", 3600.0)
    assert identity_of(folder) == identity_of(folder)
    assert len(hashed) == 2


@pytest.mark.parametrize(
    "record", ["", "[]", '{"model.safetensors": 5}', '{"model.safetensors": {"stamp": [1]}}', "\xff"]
)
def test_a_record_that_is_no_record_is_made_again(folder: Path, hashed: list[str], record: str) -> None:
    (folder / digests.RECORD_FILE).write_text(record, encoding="latin-1")
    assert identity_of(folder) == identity_of(folder)
    assert len(hashed) == 1


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')


def no_family(folder: Path) -> None:
    (folder / "config.json").write_text('["model_type"]')


def wrong_types(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "three"}))


def other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def not_a_decoder(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}')


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


BREAKERS = [
    break_tokenizer,
    break_json,
    unknown_family,
    no_family,
    wrong_types,
    other_sizes,
    lose_a_tensor,
    lose_all,
    cut,
    not_a_decoder,
]


@pytest.mark.parametrize("damage", BREAKERS)
def test_a_model_that_is_not_whole_is_refused_in_one_line(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
