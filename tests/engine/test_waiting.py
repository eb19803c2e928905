"""Who goes first, and who waits for a prefix that another request is computing: nothing is computed twice."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.sequence import Progress, RequestId
from tests.engine.families import Pair, build_pair, random_prompt
from tests.engine.stores import Sizes, open_cache, open_store, pinned_bytes

GREEDY = SamplingParams(tokens_max=4, ignore_eos=True)
CONTEXT = random_prompt(1, 256)
PROMPTS = [[*CONTEXT, *random_prompt(2 + i, 9)] for i in range(3)]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


def ended(engine: Engine) -> list[RequestId]:
    """Run until nothing is left; the order in which requests ended."""
    found = []
    while engine.has_work:
        found += [output.request_id for output in engine.step() if output.reason is not None]
    return found


@pytest.mark.parametrize("sizes", [Sizes(device=16, host=16), Sizes(device=0, host=32), Sizes(device=6, host=32)])
def test_requests_share_the_prefix_that_the_first_is_computing(pair: Pair, sizes: Sizes) -> None:
    with open_store(pair.model.spec, sizes) as store:
        with open_cache(store) as cache:
            engine = Engine(pair.model, cache, EngineConfig(token_budget=96))
            answers = engine.generate(PROMPTS, GREEDY)
            engine.close()
        assert set(pinned_bytes(store).values()) == {0}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == pair.greedy(prompt, 4)
    # 256 of the shared text once, and of each prompt its own 9 and the 3 of its answer that are attended to.
    assert engine.counters.tokens_computed == 256 + 3 * (9 + 3)
    assert [sum(answer.cached_tokens.values()) for answer in answers] == [0, 256, 256]


def test_who_waits_goes_on_when_the_one_that_computes_is_aborted(pair: Pair) -> None:
    with open_store(pair.model.spec, Sizes(device=16, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=64))
        first, second = (engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:2])
        engine.step()
        engine.step()
        assert engine.progress(first) == Progress(128, 265, waiting=False)
        assert engine.abort(first)
        tokens = []
        while engine.has_work:
            tokens += [output.token for output in engine.step() if output.request_id == second]
        assert tuple(tokens) == pair.greedy(PROMPTS[1], 4)
        assert engine.counters.tokens_from["engine"] + engine.counters.tokens_from["device"] == 128
        assert engine.progress(second) is None
        engine.close()


def test_one_of_higher_priority_does_not_wait_for_a_lower_one(pair: Pair) -> None:
    with open_store(pair.model.spec, Sizes(device=16, host=16)) as store, open_cache(store) as cache:
        engine = Engine(pair.model, cache, EngineConfig(token_budget=64))
        low = engine.add_request(PROMPTS[0], GREEDY)
        engine.step()
        high = engine.add_request(PROMPTS[1], GREEDY, priority=1)
        assert ended(engine) == [high, low]
        engine.close()


@pytest.mark.parametrize(("schedule", "order"), [("fcfs", [1, 2, 3]), ("priority", [3, 1, 2]), ("shortest", [3, 2, 1])])
def test_the_schedule_says_who_goes_first(pair: Pair, schedule: str, order: list[int]) -> None:
    engine = Engine(pair.model, None, EngineConfig(token_budget=32, running_max=1, schedule=schedule))
    engine.add_request(random_prompt(1, 60), GREEDY)
    engine.add_request(random_prompt(2, 20), GREEDY)
    engine.add_request(random_prompt(3, 40), GREEDY, priority=5)
    assert (engine.running, engine.waiting) == (0, 3)
    assert ended(engine) == order
    engine.close()


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="one of priority, fcfs, shortest"):
        EngineConfig(schedule="random")
