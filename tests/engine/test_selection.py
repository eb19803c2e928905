"""Selected attention: the blocks that matter are read, the others are bounded, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstore.core.errors import InvalidArgument
from kvstore.engine.attention import ColdPart
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine, TokenOutput
from kvstore.engine.forcing import Watched
from kvstore.engine.needle import Haystack, make_haystack, make_needle_model
from kvstore.engine.params import SamplingParams, Selected
from kvstore.engine.selection import Selector
from kvstore.engine.weights import Model, load_model
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.paged import AttentionOptions, Partial
from tests.engine.families import build_pair, random_prompt
from tests.engine.stores import Sizes, open_cache, open_store
from tests.engine.test_placement import MemoryReader
from tests.kernels.cases import Case

SIZES = Sizes(device=8, host=16, ssd=2000)
CONFIG = EngineConfig(token_budget=512, host_share=0.0, kv_dtype="float16")


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("needle")
    make_needle_model(folder, seed=1)
    return load_model(folder, codec="int8")


def ask(engine: Engine, haystack: Haystack, selected: Selected | None) -> list[TokenOutput]:
    """Every key of the haystack, one after the other."""
    keys = list(haystack.answers)
    params = SamplingParams(tokens_max=len(keys), ignore_eos=True, attention=selected)
    watched = Watched(keys[1:] + keys[:1])
    engine.add_request(haystack.ask(keys[0]), params, draw=watched)
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [choice.token for choice in watched.choices] == list(haystack.answers.values())
    return outputs


def test_needles_are_found_at_two_percent_of_the_blocks(needle: Model, tmp_path: Path) -> None:
    haystack = make_haystack(16_000, tuple(i / 9 for i in range(10)), seed=3)
    with open_store(CONFIG.spec_for(needle.spec), SIZES, tmp_path) as store, open_cache(store) as cache:
        engine = Engine(needle, cache, CONFIG)
        exact = ask(engine, haystack, None)
        read = engine.counters.bytes_attended["ssd"]
        chosen = ask(engine, haystack, Selected(max_share=0.02))
        slices = CONFIG.spec_for(needle.spec).geometry.int8_bytes
        # The digests of 242 blocks are made once; of 9 tokens each then reads 5 blocks of one layer at most.
        assert (engine.counters.bytes_attended["ssd"] - read) // slices <= 250 + 9 * 5
        engine.close()
    assert {output.left_out for output in exact} == {0.0}
    assert all(0.0 <= output.left_out < 1e-6 for output in chosen)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_needles_in_131072_tokens_at_two_percent_of_the_blocks(needle: Model, tmp_path: Path) -> None:
    """A hundred needles, each asked at the end of the same context: all must be found among 41 of 2,048 blocks."""
    haystack = make_haystack(131_072, tuple(i / 99 for i in range(100)), seed=11)
    sizes = Sizes(device=64, host=96, ssd=4096)
    with open_store(CONFIG.spec_for(needle.spec), sizes, tmp_path) as store, open_cache(store, 256 << 20) as cache:
        engine = Engine(needle, cache, replace(CONFIG, token_budget=4096))
        outputs = ask(engine, haystack, Selected(max_share=0.02))
        engine.close()
    assert len(outputs) == 100
    assert max(output.left_out for output in outputs) < 1e-6


def test_everything_selected_is_exact_and_little_of_it_is_bounded(tmp_path: Path) -> None:
    pair = build_pair("llama")
    prompt, greedy = random_prompt(9, 1500), SamplingParams(tokens_max=6, ignore_eos=True)
    config = replace(CONFIG, token_budget=128, kv_dtype=None)
    with open_store(pair.model.spec, Sizes(device=3, host=6, ssd=200), tmp_path) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        every = replace(greedy, attention=Selected(mass=1.0, max_share=1.0))
        assert engine.generate([prompt], every)[0].tokens == pair.greedy(prompt, 6)
        engine.add_request(prompt, replace(greedy, attention=Selected(mass=0.5, max_share=0.1)))
        bounds = []
        while engine.has_work:
            bounds += [output.left_out for output in engine.step()]
        engine.close()
    # The first token is drawn by a step that computes what is left of the prompt.
    assert all(0.0 < bound <= 1.0 for bound in bounds[1:])


def test_the_bound_holds_of_the_mass_that_is_left_out() -> None:
    for seed in range(4):
        case = Case(2, 3, 64, 64, "float32", "raw", contexts=(40 * 64,), queries=(1,), spread=3.0, seed=seed)
        query, batch = case.build()
        options = AttentionOptions(64**-0.5 * 2)
        whole = paged_attention(query, batch, options, layer=1)
        there = batch.addresses[0] != 0
        reader = MemoryReader(batch.addresses[0][there].numpy(), batch.starts[0][there].numpy(), batch)
        selector = Selector(batch.geometry, 2)
        part = ColdPart(reader, 0, 1, 40 * 64, 0, batch.geometry, selector, Selected(mass=0.6, max_share=0.3))
        nothing = Partial(torch.zeros_like(whole.out), torch.full_like(whole.lse, -torch.inf))
        found = part.attend(query, nothing, options, 1)
        left = 1.0 - torch.exp(found.lse - whole.lse)
        assert float(left.max()) <= selector.left_out + 1e-5
        assert float(left.max()) > 0.0


@pytest.mark.parametrize("field", ["mass", "max_share"])
@pytest.mark.parametrize("value", [0.0, 1.5])
def test_shares_are_shares(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument):
        Selected(**{field: value})
