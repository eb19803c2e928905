"""The engine: requests in, tokens out.

::

    add_request -> Scheduler.plan -> build_step -> ModelRunner.run -> CacheLink.confirm -> sample -> BlockManager.seal
                   (match, fetch,                  (writes K and V,   (pins lived        -> outputs
                    reserve, demote)                paged attention)   until here?)

If the session with the cache ends at any point, what the engine held of it counts as gone: the step's results are
thrown away unless they were confirmed before, the requests begin again from their tokens in the engine's own memory,
and the cache is tried again every now and then. Those that this memory can not hold wait for the cache, and go on from
what its storage has of them. A token that was handed out stays handed out.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from kvstore.cache import Cache
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import InvalidArgument
from kvstore.engine.cold import ColdLost
from kvstore.engine.config import EngineConfig
from kvstore.engine.counters import Counters
from kvstore.engine.link import LOG, CacheLink, LinkLost
from kvstore.engine.manager import BlockManager
from kvstore.engine.model import ModelRunner
from kvstore.engine.sampling import Draw, Sampler, SamplingParams, TokenLogprobs
from kvstore.engine.scheduler import Scheduler, Share
from kvstore.engine.sequence import FinishReason, Progress, RequestId, Sequence
from kvstore.engine.step import Cold, StepInput, build_step
from kvstore.engine.text import TextStream
from kvstore.engine.weights import Model


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one request. ``text`` is what became certain with it; ``reason`` is set with the last one.

    ``token`` is None where a request ended without a new token (aborted, out of memory, or its cache lost).
    ``cached_tokens`` comes with the first token and the last: tokens that were not computed, by where they came from.
    ``left_out`` is, with selected attention, a bound of the share of any head's mass that was not read for this token.
    """

    request_id: RequestId
    token: int | None
    text: str = ""
    reason: FinishReason | None = None
    cached_tokens: dict[str, int] = field(default_factory=dict)
    logprobs: TokenLogprobs | None = None
    left_out: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. ``cached_tokens`` counts tokens of its prompt that were not computed, by where they came from."""

    request_id: RequestId
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    cached_tokens: dict[str, int] = field(default_factory=dict)


class Engine:
    """Serves one model over one cache. Not thread-safe: one thread adds requests and steps.

    ``cache`` stays the caller's, who closes it after ``close``. It must raise its errors (a client made with
    ``strict=True``); None runs without a cache, in private memory.
    """

    def __init__(
        self, model: Model, cache: Cache | None, config: EngineConfig | None = None, clock: Clock | None = None
    ) -> None:
        self._model = model
        self._config = config or EngineConfig()
        self.counters = Counters()
        self._spec = self._config.spec_for(model.spec)
        self._link = CacheLink(cache, self._spec, self._config, clock or MonotonicClock())
        self._link.attach()
        self._blocks = BlockManager(self._link, self._spec, self._config, self.counters)
        self._scheduler = Scheduler(self._config, self._blocks, self._link, self.counters)
        self._cold = Cold(self._blocks.readers, model.windows or (None,) * self._spec.layers, self._config.hot_bytes)
        self._runner = ModelRunner(model.network, self._link.device)
        self._next_id = 1
        self._ended: list[TokenOutput] = []

    @property
    def has_work(self) -> bool:
        """True while a request has not ended or an output was not handed out."""
        return len(self._scheduler) > 0 or bool(self._ended)

    @property
    def cache_is_up(self) -> bool:
        """True while the engine has a session with its cache."""
        return self._link.up

    def add_request(
        self,
        prompt: str | Items[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        draw: Draw | None = None,
    ) -> RequestId:
        """Queue a prompt (text, or token ids); higher ``priority`` goes first.

        ``draw`` takes the place of the sampler that ``params`` describe, such as one that feeds given tokens.
        Raises InvalidArgument for an empty prompt, one that fills the model's positions, token ids outside the
        vocabulary, text or stop strings where the model has no tokenizer, and a prompt that no tier has room for.
        """
        params = params or SamplingParams()
        tokens = self.tokens_of(prompt)
        if params.stop and self._model.text is None:
            raise InvalidArgument("sampling.stop", params.stop, "none, since this model has no tokenizer")
        self._blocks.cooling.check_fits(len(tokens))
        stream = TextStream(self._model.text, params.stop) if self._model.text is not None else None
        request_id, self._next_id = RequestId(self._next_id), self._next_id + 1
        draw = draw or Sampler(params)
        place = self._config.place_of(priority, len(tokens) + params.tokens_max)
        self._scheduler.add(Sequence(request_id, tokens, len(tokens), params, draw, *place, stream))
        return request_id

    @property
    def running(self) -> int:
        """Requests that hold memory now."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return len(self._scheduler) - self._scheduler.running

    def progress(self, request_id: RequestId) -> Progress | None:
        """How far a request is; None once it has ended."""
        sequence = self._scheduler.find(request_id)
        return None if sequence is None else Progress.of(sequence)

    def abort(self, request_id: RequestId) -> bool:
        """End a request; its last output has reason ABORTED. False if it has ended already."""
        sequence = self._scheduler.find(request_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.ABORTED)
        self._ended.append(TokenOutput(request_id, None, _rest(sequence), FinishReason.ABORTED))
        return True

    def step(self) -> list[TokenOutput]:
        """Compute the next tokens; returns what came of it, which is nothing while all requests wait or are prefilled.

        Never raises for a failure of the cache. Blocks on the cache only while no request can run, for at most
        ``config.wait_ms``.
        """
        outputs, self._ended = self._ended, []
        try:
            self._link.attach()
            shares = self._scheduler.plan()
            outputs += self._starved()
            if not shares:
                self._scheduler.wait()
                return outputs
            step = build_step(shares, self._spec, self._link.device, self._cold)
            logits = self._runner.run(step)
            self._link.confirm()
        except ColdLost as lost:
            LOG.warning("%s; what follows it is computed again", lost)
            self.counters.steps_discarded += 1
            self._recompute(shares)
            return outputs
        except LinkLost:
            self.counters.steps_discarded += 1
            self._lost()
            return outputs
        self.counters.steps += 1
        self.counters.tokens_computed += sum(share.count for share in shares)
        self.counters.tokens_attended += step.attended
        self.counters.tokens_attended_int8 += step.attended_int8
        self._count_bytes(step)
        return outputs + self._accept(shares, logits)

    def generate(
        self, prompts: Items[str | Items[int]], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer all prompts and return the answers in their order. Other requests of the engine go on meanwhile."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        ids = [self.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        sequences = {i: self._scheduler.find(i) for i in ids}
        texts: dict[RequestId, list[str]] = {i: [] for i in ids}
        ended: dict[RequestId, FinishReason] = {}
        while len(ended) < len(ids):
            for output in self.step():
                if output.request_id in texts:
                    texts[output.request_id].append(output.text)
                    if output.reason is not None:
                        ended[output.request_id] = output.reason
        return [_completion(s, "".join(texts[i]), ended[i]) for i, s in sequences.items() if s is not None]

    def close(self) -> None:
        """End all requests and give everything back to the cache, which stays open. Idempotent."""
        for sequence in self._scheduler:
            self._finish(sequence, FinishReason.ABORTED)
        self._link.close()

    def tokens_of(self, prompt: str | Items[int]) -> list[int]:
        """Token ids of a prompt. Raises InvalidArgument as ``add_request`` does; for any thread."""
        if isinstance(prompt, str):
            if self._model.text is None:
                raise InvalidArgument("prompt", "text", "token ids, since this model has no tokenizer")
            tokens = self._model.text.encode(prompt)
        else:
            tokens = [int(token) for token in prompt]
        if not 0 < len(tokens) < self._model.positions_max:
            raise InvalidArgument("prompt", f"{len(tokens)} tokens", f"1 to {self._model.positions_max - 1} tokens")
        vocabulary = self._model.network.config.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise InvalidArgument("prompt", f"token {min(tokens)} to {max(tokens)}", f"0 to {vocabulary - 1} each")
        return tokens

    def _accept(self, shares: list[Share], logits: torch.Tensor) -> list[TokenOutput]:
        """Count the step as done: draw tokens, seal what is full, end what is finished."""
        outputs: list[TokenOutput] = []
        rows = iter(logits)
        for share in shares:
            draws = share.draws
            share.sequence.computed += share.count
            if draws:
                outputs.append(self._draw(share.sequence, next(rows)))
        try:
            self._blocks.seal([share.sequence for share in shares])
        except LinkLost:
            self._lost()
        finished = {output.request_id: output.reason for output in outputs if output.reason is not None}
        for share in shares:
            reason = finished.get(share.sequence.request_id)
            if reason is not None:
                self._finish(share.sequence, reason)
        return outputs

    def _draw(self, sequence: Sequence, logits: torch.Tensor) -> TokenOutput:
        token = sequence.sampler.next_token(logits)
        sequence.tokens.append(token)
        self.counters.tokens_generated += 1
        params = sequence.params
        ends = token in params.stop_tokens or (not params.ignore_eos and token in self._model.eos_ids)
        text, stopped = "", False
        if sequence.stream is not None and not ends:
            text = sequence.stream.add(token)
            stopped = sequence.stream.stopped
        full = sequence.generated >= params.tokens_max or len(sequence.tokens) >= self._model.positions_max
        reason = FinishReason.STOP if ends or stopped else FinishReason.LENGTH if full else None
        if reason is not None:
            text += _rest(sequence)
            if sequence.stream is not None and sequence.stream.stopped:
                reason = FinishReason.STOP
        cached = dict(sequence.cached_tokens) if sequence.generated == 1 or reason is not None else {}
        told = None if params.logprobs is None else TokenLogprobs.of(logits, token, params.logprobs)
        return TokenOutput(sequence.request_id, token, text, reason, cached, told, self._cold.left_out(sequence.table))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        try:
            self._scheduler.finish(sequence, reason)
        except LinkLost:
            self._lost()

    def _starved(self) -> list[TokenOutput]:
        ended, self._scheduler.starved = self._scheduler.starved, []
        return [TokenOutput(s.request_id, None, _rest(s), s.reason) for s in ended]

    def _count_bytes(self, step: StepInput) -> None:
        attended, tally = self.counters.bytes_attended, self._blocks.readers.tally
        for name, nbytes in step.memory_bytes.items():
            attended[name] += nbytes
        attended["hot"] = tally.hot_bytes
        attended["ssd"], self.counters.cold_wait_s = tally.nbytes, tally.waited_s

    def _recompute(self, shares: list[Share]) -> None:
        """A block of a share was lost: those that read from storage find again what there is, and compute the rest."""
        try:
            for share in shares:
                if len(share.sequence.table.cold):
                    self._scheduler.begin_again(share.sequence)
        except LinkLost:
            self._lost()

    def _lost(self) -> None:
        self.counters.links_lost = self._link.losses
        self._scheduler.link_lost()


def _rest(sequence: Sequence) -> str:
    return sequence.stream.finish() if sequence.stream is not None else ""


def _completion(sequence: Sequence, text: str, reason: FinishReason) -> Completion:
    answer = tuple(sequence.tokens[sequence.prompt_tokens :])
    return Completion(sequence.request_id, sequence.prompt_tokens, answer, text, reason, dict(sequence.cached_tokens))
