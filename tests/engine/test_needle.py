"""The constructed model: transformers alone finds its needles, and so does the engine, over any tiers."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kvstore.core.errors import InvalidArgument
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.needle import MARGIN_MIN, POSITIONS_MAX, Haystack, make_haystack, make_needle_model
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.weights import load_model
from kvstore.tools.make_needle_model import main as make_needle_model_command
from tests.engine.stores import Sizes, open_cache, open_store

DEPTHS = (0.0, 0.13, 0.5, 0.77, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("needle")
    assert make_needle_model(path, seed=1) >= MARGIN_MIN
    return path


def answers_of_transformers(folder: Path, haystack: Haystack, attention: str) -> dict[int, int]:
    """The model's next token for each key, asked in one pass: a key that comes again is a question of its own."""
    network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    found = {}
    with torch.inference_mode():
        for key in haystack.answers:
            logits = network(torch.tensor([haystack.ask(key)]), use_cache=False, logits_to_keep=1).logits
            found[key] = int(logits[0, -1].argmax())
    return found


def test_transformers_alone_answers_at_two_thousand_tokens(folder: Path) -> None:
    haystack = make_haystack(2000, DEPTHS, seed=3)
    assert answers_of_transformers(folder, haystack, "eager") == haystack.answers


@pytest.mark.slow
def test_transformers_alone_answers_at_eight_thousand_tokens(folder: Path) -> None:
    haystack = make_haystack(8000, tuple(i / 9 for i in range(10)), seed=4)
    assert answers_of_transformers(folder, haystack, "sdpa") == haystack.answers


def test_far_positions_are_no_harder(folder: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    haystack = make_haystack(300, (0.4,), seed=5)
    (key,) = haystack.answers
    last = POSITIONS_MAX - 1
    positions = torch.arange(last - 300, last + 1)[None]
    with torch.inference_mode():
        answer = network(torch.tensor([haystack.ask(key)]), position_ids=positions, use_cache=False)
    weights = answer.logits[0, -1].sort(descending=True)
    assert int(weights.indices[0]) == haystack.answers[key]
    assert float(weights.values[0]) > 2 * float(weights.values[1])


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_engine_answers_with_most_of_the_context_below_device(folder: Path, codec: str, tmp_path: Path) -> None:
    haystack = make_haystack(1500, DEPTHS, seed=6)
    model = load_model(folder, codec=codec)
    with open_store(model.spec, Sizes(device=4, host=64, ssd=64), tmp_path) as store, open_cache(store) as cache:
        engine = Engine(model, cache, EngineConfig(token_budget=128, running_max=1))
        params = SamplingParams(tokens_max=1, ignore_eos=True)
        found = engine.generate([haystack.ask(key) for key in haystack.answers], params)
        assert engine.counters.blocks_demoted > 0
        engine.close()
    assert [answer.tokens[0] for answer in found] == list(haystack.answers.values())


def test_a_million_other_tokens_weigh_nothing() -> None:
    assert 1_000_000 * math.exp(-MARGIN_MIN) < 1e-11


def test_a_seed_is_a_model(folder: Path, tmp_path: Path) -> None:
    make_needle_model(tmp_path / "again", seed=1)
    make_needle_model(tmp_path / "other", seed=2)
    files = [folder / "model.safetensors", *(tmp_path / name / "model.safetensors" for name in ("again", "other"))]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert digests[0] == digests[1] != digests[2]
    assert files[0].stat().st_size < 50 << 20


def test_haystacks_hold_each_needle_once() -> None:
    haystack = make_haystack(1000, DEPTHS, seed=7)
    assert len(haystack.tokens) == 1000
    for key, value in haystack.answers.items():
        assert haystack.tokens.count(key) == 1
        assert haystack.tokens[haystack.tokens.index(key) + 1] == value
    assert next(iter(haystack.answers)) == haystack.tokens[1]
    assert list(haystack.answers.values())[-1] == haystack.tokens[-1]


@pytest.mark.parametrize(("length", "depths"), [(2, (0.0,)), (100, (0.5, 0.5)), (100, (1.5,)), (4, (0.0, 1.0))])
def test_needles_that_do_not_fit_are_refused(length: int, depths: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument):
        make_haystack(length, depths, seed=1)


def test_the_command_writes_a_folder_and_refuses_a_file(folder: Path, tmp_path: Path) -> None:
    runner, app = CliRunner(), typer.Typer()
    app.command()(make_needle_model_command)
    done = runner.invoke(app, ["--seed", "1", "--out", str(tmp_path / "model")])
    assert done.exit_code == 0
    assert load_model(tmp_path / "model").spec == load_model(folder).spec
    (tmp_path / "file").write_text("")
    refused = runner.invoke(app, ["--out", str(tmp_path / "file")])
    assert (refused.exit_code, "error:" in refused.output) == (2, True)
