"""Every family equals transformers alone: logits of all positions, and greedy tokens of a batch in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvstore.core.clock import ManualClock
from kvstore.engine.config import EngineConfig
from kvstore.engine.counters import Counters
from kvstore.engine.engine import Engine
from kvstore.engine.link import CacheLink
from kvstore.engine.manager import BlockManager
from kvstore.engine.model import ModelRunner
from kvstore.engine.sampling import Sampler, SamplingParams
from kvstore.engine.scheduler import Share
from kvstore.engine.sequence import RequestId, Sequence
from kvstore.engine.step import StepInput, build_step
from tests.engine.families import FAMILIES, build_pair, random_prompt


def every_row(step: StepInput) -> StepInput:
    """The same step with the logits of all its tokens wanted."""
    return replace(step, rows=torch.arange(step.token_ids.shape[1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    pair = build_pair(family)
    config, params = EngineConfig(), SamplingParams()
    link = CacheLink(None, pair.model.spec, config, ManualClock())
    blocks = BlockManager(link, pair.model.spec, EngineConfig(private_bytes=1 << 24), Counters())
    runner = ModelRunner(pair.model.network)
    sequences = [
        Sequence(RequestId(i), random_prompt(i, length), length, params, Sampler(params), 0)
        for i, length in enumerate((200, 3, 129))
    ]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    while any(s.remaining for s in sequences):
        shares = [Share(s, min(s.remaining, 70)) for s in sequences if s.remaining]
        for share in shares:
            assert blocks.grow_private(share.sequence, share.count) == share.count
        logits = runner.run(every_row(build_step(shares, pair.model.spec, all_rows=True)))
        for share, rows in zip(shares, logits.split([s.count for s in shares]), strict=True):
            found[share.sequence.request_id].append(rows)
            share.sequence.computed += share.count
    for sequence in sequences:
        expected = pair.logits(sequence.tokens)
        torch.testing.assert_close(torch.cat(found[sequence.request_id]), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str) -> None:
    pair = build_pair(family)
    engine = Engine(pair.model, None, EngineConfig(token_budget=96, private_bytes=1 << 26))
    prompts = [random_prompt(10 + i, length) for i, length in enumerate((1, 5, 63, 64, 65, 130, 257))]
    answers = engine.generate(prompts, SamplingParams(tokens_max=9, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == pair.greedy(prompt, 9), len(prompt)
    engine.close()
