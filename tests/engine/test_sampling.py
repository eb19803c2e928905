"""Sampling: greedy, its filters against a plain definition, seeds, and refusals."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvstore.core.errors import InvalidArgument
from kvstore.engine.sampling import Sampler, SamplingParams, TokenLogprobs

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def draws(params: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(params)
    return [sampler.next_token(logits) for _ in range(count)]


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert draws(SamplingParams(), 3) == [1, 1, 1]
    assert draws(SamplingParams(), 1, torch.tensor([1.0, 5.0, 5.0])) == [1]


def test_a_seed_gives_the_same_answer_again_and_another_seed_another() -> None:
    params = SamplingParams(temperature=1.5, seed=11)
    first = draws(params, 64)
    assert draws(params, 64) == first
    assert draws(SamplingParams(temperature=1.5, seed=12), 64) != first
    assert draws(SamplingParams(temperature=1.5), 64) != draws(SamplingParams(temperature=1.5), 64)


def test_neighbours_do_not_disturb_each_other() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    alone = draws(params, 20)
    one, other = Sampler(params), Sampler(SamplingParams(temperature=1.0, seed=6))
    together = []
    for _ in range(20):
        together.append(one.next_token(LOGITS))
        other.next_token(LOGITS)
    assert together == alone


@pytest.mark.parametrize(("top_k", "expected"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (99, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_k_largest(top_k: int, expected: set[int]) -> None:
    assert set(draws(SamplingParams(temperature=2.0, top_k=top_k, seed=1), 400)) == expected


@pytest.mark.parametrize(("top_p", "expected"), [(0.01, {1}), (0.63, {1}), (0.7, {1, 3}), (0.9, {1, 2, 3})])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float, expected: set[int]) -> None:
    # The chances of LOGITS are 0.032, 0.636, 0.086, 0.234, 0.012.
    assert set(draws(SamplingParams(temperature=1.0, top_p=top_p, seed=1), 400)) == expected


def test_frequencies_follow_the_softmax_of_the_scaled_logits() -> None:
    count, temperature = 20_000, 0.7
    seen = Counter(draws(SamplingParams(temperature=temperature, seed=3), count))
    expected = torch.softmax(LOGITS / temperature, 0)
    for token, chance in enumerate(expected.tolist()):
        # Five standard deviations of a binomial draw; a wrong temperature is further away by far.
        assert abs(seen[token] / count - chance) < 5 * (chance * (1 - chance) / count) ** 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_max", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("stop", ("a", "")),
        ("seed", -1),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"sampling.{field}"


def test_logprobs_are_the_model_s_own_before_temperature() -> None:
    expected = torch.log_softmax(LOGITS, dim=-1).tolist()
    found = TokenLogprobs.of(LOGITS, 2, 2)
    assert found.logprob == pytest.approx(expected[2])
    assert [token for token, _ in found.top] == [1, 3]
    assert [value for _, value in found.top] == pytest.approx([expected[1], expected[3]])
    assert len(TokenLogprobs.of(LOGITS, 2, 20).top) == len(LOGITS)
