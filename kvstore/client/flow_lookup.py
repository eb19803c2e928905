"""Blocks are looked for in several namespaces at one time, and held. No I/O; see ``flows.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.cache import MatchResult, NearNamespace
from kvstore.client.flow_get import OwnLease
from kvstore.client.operations import Operation, request_of
from kvstore.client.steps import Connect, Flow, Send, Wait
from kvstore.core.types import BATCH_KEYS_MAX, BlockKey, NamespaceId, Reason

if TYPE_CHECKING:
    from kvstore.client.flows import Flows


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that one namespace has, from the first key on: how many, where, and why there are no more."""

    matched: int
    residency: tuple[int, ...]
    reason: Reason
    near: tuple[NearNamespace, ...]

    @classmethod
    def of(cls, batches: Sequence[tuple[MatchResult, int, int]]) -> Run:
        """Join the answers of batches: each with how many of how many keys are held."""
        residency: tuple[int, ...] = ()
        reason, near = Reason.NONE, batches[0][0].near if batches else ()
        for match, held, size in batches:
            matched = min(match.matched, held)
            residency += match.residency[:matched]
            reason = match.reason
            if matched < size:
                break
        return cls(len(residency), residency, reason, near)


@dataclass(frozen=True, slots=True)
class Looked:
    """The answer of a lookup: the run that all namespaces have, that of each, and the lease that holds it."""

    asked: tuple[tuple[NamespaceId, Sequence[BlockKey]], ...]
    matched: int
    runs: tuple[Run, ...]
    lease: OwnLease | None


class Lookups:
    """The flow that looks, under the leases that gets use."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows

    def lookup(self, asked: Sequence[tuple[NamespaceId, Sequence[BlockKey]]], hold: bool) -> Flow[Looked]:
        """What runs of blocks several namespaces have, in one round trip; with ``hold`` they stay until its end.

        Raises what stands in the way.
        """
        lease: OwnLease | None = None
        if hold:
            lease = yield from self._flows.gets.take_lease()
        link = self._flows.link if lease is None else lease.link
        if link is None or link.closed:
            link = yield Connect()
        operations, timeout_s = self._flows.operations, self._flows.options.timeout_s
        calls: list[tuple[Operation[Any], Any]] = []
        settled = False
        try:
            for namespace_id, keys in _batches(asked):
                begun: list[Operation[Any]] = [operations.match(namespace_id, keys)]
                if lease is not None:
                    begun.insert(0, operations.hold(lease.lease_id, namespace_id, keys))
                for operation in begun:
                    sent = yield Send(link, operation.method, request_of(operation), timeout_s)
                    calls.append((operation, sent))
            answers: list[Any] = []
            while calls:
                operation, sent = calls.pop(0)
                reply = yield Wait(link, sent, operation.method, timeout_s)
                answers.append(operation.parse(operation.reply.FromString(reply), link.generation))
            settled = True
        finally:
            for _, sent in calls:
                link.forget(sent)
            if lease is not None and not settled:
                self._flows.gets.give_back(lease, asked[0][0], (), settled=False)
        found = iter(answers)
        looked = [Run.of([_answer(found, hold, len(keys)) for _, keys in _batches([one])]) for one in asked]
        result = Looked(tuple(asked), min((run.matched for run in looked), default=0), tuple(looked), lease)
        if lease is not None and not result.matched:
            self.end(result)
            return replace(result, lease=None)
        return result

    def find(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Flow[list[bool]]:
        """Whether each block by itself is there. Raises what stands in the way."""
        lease, settled = (yield from self._flows.gets.take_lease()), False
        there: list[bool] = []
        try:
            for _, part in _batches([(namespace_id, keys)]):
                held = yield from self._flows.on(
                    lease.link, self._flows.operations.hold(lease.lease_id, namespace_id, part)
                )
                there += held
                self._flows.post(self._flows.operations.release(lease.lease_id, namespace_id, part), lease.link)
            settled = True
        finally:
            self._flows.gets.give_back(lease, namespace_id, (), settled=settled)
        return there

    def end(self, looked: Looked) -> None:
        """What it held may go; the lease is kept for the next one."""
        if looked.lease is None:
            return
        batches = list(_batches(looked.asked))
        for namespace_id, keys in batches[:-1]:
            if not looked.lease.link.closed:
                release = self._flows.operations.release(looked.lease.lease_id, namespace_id, keys)
                self._flows.post(release, looked.lease.link)
        self._flows.gets.give_back(looked.lease, *batches[-1], settled=True)


def _batches(asked: Sequence[tuple[NamespaceId, Sequence[BlockKey]]]) -> Iterator[tuple[NamespaceId, Any]]:
    """What one call can ask for each."""
    for namespace_id, keys in asked:
        for begin in range(0, len(keys), BATCH_KEYS_MAX):
            yield namespace_id, keys[begin : begin + BATCH_KEYS_MAX]


def _answer(answers: Iterator[Any], hold: bool, size: int) -> tuple[MatchResult, int, int]:
    """The next batch's match, of how many keys how many are held (all, if none was to be)."""
    held = next(answers) if hold else ()
    return next(answers), held.index(False) if False in held else size, size
