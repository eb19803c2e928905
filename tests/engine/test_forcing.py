"""A request that is fed given tokens, and what the engine counts of the blocks that its tokens attended to."""

from __future__ import annotations

import pytest
import torch

from kvstore.core.types import Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.forcing import Choice, Watched
from kvstore.engine.sampling import SamplingParams
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.stores import Sizes, clear_tier, open_cache, open_store

TOKENS = 16
PARAMS = SamplingParams(tokens_max=TOKENS, ignore_eos=True)


def run(engine: Engine, prompt: list[int], watch: Watched) -> list[int]:
    request = engine.add_request(prompt, PARAMS, draw=watch)
    found = []
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request
            assert output.token is not None
            found.append(output.token)
    return found


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


def test_without_tokens_a_watched_request_says_what_greedy_says(pair: Pair) -> None:
    prompt, watch = random_prompt(11, 90), Watched()
    found = run(Engine(pair.model, None), prompt, watch)
    assert tuple(found) == pair.greedy(prompt, TOKENS)
    assert [choice.token for choice in watch.choices] == found
    logits = pair.logits(prompt + found)[len(prompt) - 1 : -1]
    top = logits.topk(2).values
    for choice, margin in zip(watch.choices, (top[:, 0] - top[:, 1]).tolist(), strict=True):
        assert choice.margin == pytest.approx(margin, abs=1e-3)


def test_given_tokens_are_fed_and_the_choices_are_those_over_them(pair: Pair) -> None:
    prompt, fed = random_prompt(12, 90), random_prompt(13, TOKENS)
    watch = Watched(fed)
    assert run(Engine(pair.model, None), prompt, watch) == fed
    expected = pair.logits(prompt + fed)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert [choice.token for choice in watch.choices] == expected
    assert expected != fed


def test_more_tokens_than_given_are_an_error() -> None:
    watch = Watched([4])
    assert watch.next_token(torch.tensor([1.0, 5.0, 3.5])) == 4
    assert watch.choices == [Choice(1, 1.5)]
    with pytest.raises(IndexError):
        watch.next_token(torch.zeros(3))


def test_the_engine_counts_what_its_tokens_attended_to(pair: Pair) -> None:
    config, prompt = EngineConfig(codec="int8", token_budget=128), random_prompt(14, 300)
    contexts = sum(range(300, 300 + TOKENS))
    with open_store(config.spec_for(pair.model.spec), Sizes(device=8, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        run(engine, prompt, Watched())
        # Chunks of a prompt that draw no token count for nothing, and what lies on DEVICE is raw.
        assert (engine.counters.tokens_attended, engine.counters.tokens_attended_int8) == (contexts, 0)
        clear_tier(store, Tier.DEVICE)
        run(engine, prompt, Watched())
        engine.close()
    assert engine.counters.tokens_attended == 2 * contexts
    assert engine.counters.tokens_attended_int8 == TOKENS * 256


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_k_and_v_in_fp16_of_a_model_that_computes_in_fp32(pair: Pair, codec: str) -> None:
    config, prompt = EngineConfig(kv_dtype="float16", codec=codec, token_budget=128), random_prompt(15, 400)
    expected = pair.greedy(prompt, TOKENS)
    spec = config.spec_for(pair.model.spec)
    assert spec.geometry.raw_bytes * 2 == pair.model.spec.geometry.raw_bytes
    with open_store(spec, Sizes(device=5, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, config)
        cold = run(engine, prompt, Watched(expected))
        clear_tier(store, Tier.DEVICE)
        watch = Watched(expected)
        run(engine, prompt, watch)
        engine.close()
    assert tuple(cold) == expected
    assert engine.counters.blocks_demoted > 0
    assert engine.counters.tokens_from["host"] == 384
    agreeing = sum(choice.token == token for choice, token in zip(watch.choices, expected, strict=True))
    print(f"{codec} in fp16: {agreeing} of {TOKENS} tokens agree with fp32")
    # Rounding to fp16 leaves all but near ties; a block read in a wrong dtype would leave nothing.
    assert watch.choices[0].token == expected[0]
    assert agreeing >= TOKENS - (2 if codec == "raw" else 8)
