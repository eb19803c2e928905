"""SmolLM2-135M with real weights and the demo's tiers: tokens equal transformers alone, from every tier."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvstore.core.types import Tier
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.reference import Reference
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.sequence import RequestId
from kvstore.engine.weights import Model, load_model
from kvstore.store.store import Store
from tests.engine.paths import model_folder
from tests.engine.stores import Sizes, clear_tier, open_cache, open_store, pinned_bytes

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

DEMO = Sizes(device=22, host=86, ssd=1300)
"""64 MiB of DEVICE, 256 MiB of HOST and 4 GiB of SSD, in blocks of 2.9 MB."""

TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(model_folder())


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(model_folder())


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    """Real text: the source of a large module."""
    assert model.text is not None
    return model.text.encode(Path(torch.nn.modules.module.__file__).read_text()[:60_000])


def answer_with_random_arrival(
    model: Model, store: Store, prompts: Sequence[Sequence[int]], config: EngineConfig
) -> tuple[list[list[int]], Engine]:
    """Hand the prompts in at random steps; the engine is returned closed, for its counters."""
    rng = random.Random(len(prompts))
    arrivals = sorted((rng.randint(0, 2 * len(prompts)), index) for index in range(len(prompts)))
    ids: dict[RequestId, int] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    with open_cache(store) as cache:
        engine = Engine(model, cache, config)
        step = 0
        while arrivals or engine.has_work:
            while arrivals and arrivals[0][0] <= step:
                _, index = arrivals.pop(0)
                params = SamplingParams(tokens_max=TOKENS, ignore_eos=True)
                ids[engine.add_request(prompts[index], params, priority=rng.randint(0, 1))] = index
            for output in engine.step():
                assert output.token is not None
                tokens[ids[output.request_id]].append(output.token)
            step += 1
        engine.close()
    assert set(pinned_bytes(store).values()) == {0}
    return tokens, engine


def make_prompts(text: Sequence[int], lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of these lengths: two of three begin as the text does and go on with another part of it."""
    rng = random.Random(seed)
    prompts = []
    for index, length in enumerate(lengths):
        shared = min(length, rng.choice((64, 300, 700))) if index % 3 else 0
        begin = rng.randint(2000, 6000)
        prompts.append([*text[:shared], *text[begin : begin + length - shared]])
    return prompts


def test_a_long_context_and_short_ones_together(
    model: Model, reference: Reference, text: list[int], tmp_path: Path
) -> None:
    prompts = make_prompts(text, (1, 64, 65, 129, 333, 420, 800), seed=1)
    prompts.append(text[:2600])
    expected = reference.answers(prompts, TOKENS)
    with open_store(model.spec, DEMO, tmp_path) as store:
        tokens, engine = answer_with_random_arrival(model, store, prompts, EngineConfig(running_max=8))
        assert tokens == expected
        assert engine.counters.blocks_demoted > 0
        clear_tier(store, Tier.DEVICE)
        tokens, engine = answer_with_random_arrival(model, store, prompts[-2:], EngineConfig())
        assert tokens == expected[-2:]
        assert engine.counters.tokens_from["host"] > 1000
    with open_store(model.spec, DEMO, tmp_path) as store:
        tokens, engine = answer_with_random_arrival(model, store, prompts[-2:], EngineConfig())
        assert tokens == expected[-2:]
        assert engine.counters.tokens_from["ssd"] > 2600


def test_a_chat_prompt_gives_a_sensible_answer(model: Model) -> None:
    assert model.text is not None
    prompt = model.text.chat([{"role": "user", "content": "What is the capital of France? One sentence."}])
    (answer,) = Engine(model, None).generate([prompt], SamplingParams(tokens_max=16))
    assert "Paris" in answer.text
    assert answer.reason.value == "stop"


@pytest.fixture(scope="module")
def twenty(reference: Reference, text: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Twenty prompts, 13,000 tokens in all, and what transformers alone says to them: computed once for all sizes."""
    rng = random.Random(3)
    lengths = [1, 2, 63, 64, 65, 3000, 2999, *(rng.randint(100, 1000) for _ in range(13))]
    prompts = make_prompts(text, lengths, seed=2)
    return prompts, reference.answers(prompts, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "preempts"), [(DEMO, False), (Sizes(device=12, host=60, ssd=1300), True)])
def test_twenty_prompts_up_to_three_thousand_tokens(
    model: Model, twenty: tuple[list[list[int]], list[list[int]]], tmp_path: Path, sizes: Sizes, preempts: bool
) -> None:
    prompts, expected = twenty
    with open_store(model.spec, sizes, tmp_path) as store:
        tokens, engine = answer_with_random_arrival(model, store, prompts, EngineConfig())
    print(f"{sizes}: {engine.counters}")
    assert tokens == expected
    assert engine.counters.blocks_demoted > 0
    # The demo's tiers hold all that runs at one time; the smaller ones do not.
    assert engine.counters.preemptions > 0 or not preempts


@pytest.mark.slow
def test_four_thousand_tokens_with_five_percent_on_device_and_none_in_host(
    model: Model, reference: Reference, text: list[int], tmp_path: Path
) -> None:
    prompt = text[:4000]
    (expected,) = reference.answers([prompt], TOKENS)
    with open_store(model.spec, Sizes(device=3, host=6, ssd=130), tmp_path) as store, open_cache(store) as cache:
        engine = Engine(model, cache, EngineConfig(host_share=0.0))
        (answer,) = engine.generate([prompt], SamplingParams(tokens_max=TOKENS, ignore_eos=True))
        engine.close()
    assert list(answer.tokens) == expected
    assert (engine.counters.blocks_private, engine.counters.blocks_demoted) == (0, 0)
    assert engine.counters.blocks_cooled >= 57
