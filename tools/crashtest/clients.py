"""The clients of ``crashtest --daemon``: threads that put, put again, extend, get and remove blocks until the kill."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.cache import CommitEntry, CommitResult
from kvstore.client import Client, ClientOptions
from kvstore.client.payloads import PutBlocks
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.keys import parents_of
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import BlockKey, Durability, NamespaceId, Outcome, Tier
from kvstore.tools.crashtest.known import SLICE_BYTES, SPEC, Known, keys_of, payload_of
from kvstore.tools.crashtest.trace import Trace

Role = Callable[[Client, NamespaceId, random.Random], None]

CLIENTS: Final = 8
RUN_BLOCKS_MAX: Final = 6
NEW_SHARE: Final = 0.6
"""Puts of a new chain. The others name one that may be there, in part or whole, or be under way in another client."""
RECENT_CHAINS: Final = 8
DURABLE_SHARE: Final = 0.8
NOT_ALL: Final = "not all is durable"
"""How the refusal of a flush begins."""


@dataclass(slots=True)
class ClientTally:
    """Sums over all clients; the lock of ``Known`` guards them."""

    acks: int = 0
    blocks_acknowledged: int = 0
    blocks_acknowledged_again: int = 0
    blocks_refused: int = 0
    removals_acknowledged: int = 0
    flushes: int = 0
    blocks_flushed: int = 0
    flushes_refused: int = 0
    reads_checked: int = 0
    corrupt: int = 0
    faults: list[str] = field(default_factory=list)


class Clients:
    """One life's clients. ``killed`` ends them; a call that fails before it is set is a fault, and sets it."""

    def __init__(self, socket: Path, policy: NamespacePolicy, known: Known, trace: Trace, tally: ClientTally) -> None:
        self._socket = socket
        self._policy = policy
        self._known = known
        self._trace = trace
        self._tally = tally
        self.killed = threading.Event()

    def start(self, seeds: list[int]) -> list[threading.Thread]:
        """One thread a seed."""
        threads = [threading.Thread(target=self._work, args=(random.Random(seed),)) for seed in seeds]
        for thread in threads:
            thread.start()
        return threads

    def connect(self) -> Client:
        """A client whose calls raise."""
        options = ClientOptions(name="crashtest", buffer_bytes=4 << 20, strict=True, timeout_s=60.0)
        return Client(self._socket, options)

    def _roles(self) -> list[tuple[Role, float]]:
        """What a client does, and how often."""
        return [(self._put, 4), (self._seal, 2), (self._get, 3), (self._remove, 1), (self._flush, 0.2)]

    def open(self, client: Client) -> NamespaceId:
        """The namespace of all blocks."""
        return client.open_namespace(SPEC, policy=self._policy).namespace_id

    def _work(self, chance: random.Random) -> None:
        """One client, until the daemon is gone."""
        try:
            with self.connect() as client:
                namespace = self.open(client)
                roles, weights = zip(*self._roles(), strict=True)
                while not self.killed.is_set():
                    (role,) = chance.choices(roles, weights)
                    role(client, namespace, chance)
        except KVStoreError as error:
            if not self.killed.is_set():
                with self._known.lock:
                    self._tally.faults.append(f"a client failed before the kill: {type(error).__name__} {error}")
                self.killed.set()

    def _put(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        """By way of the client's buffer, as whoever has blocks to store does it."""
        keys, durability, since = self._choose(chance)
        blocks = PutBlocks(keys, parents_of(keys), [*map(payload_of, keys)], durability=durability)
        self._told(keys, client.put(namespace, blocks), durability, since)

    def _seal(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        """On DEVICE, as an engine does it: named when they are full."""
        keys, durability, since = self._choose(chance)
        reserved = client.reserve(namespace, Tier.DEVICE, count=len(keys))
        ids = [number for number in reserved.reservation_ids if number]
        places = [place for place in reserved.places if place is not None]
        if len(places) < len(keys):
            client.abort(ids)
            return
        for key, place in zip(keys, places, strict=True):
            payload, memory = payload_of(key), client.memory(place.area)
            for layer in range(SPEC.layers):
                begin = place.offset + layer * place.stride
                memory[begin : begin + SLICE_BYTES] = payload[layer * SLICE_BYTES : (layer + 1) * SLICE_BYTES]
        entries = [CommitEntry(*row) for row in zip(ids, keys, parents_of(keys), strict=True)]
        self._told(keys, client.commit(namespace, entries, durability=durability), durability, since)

    def _choose(self, chance: random.Random) -> tuple[list[BlockKey], Durability, int]:
        """What to store, how, and where the daemon's log is now."""
        keys = keys_of(self._chain(chance), chance.randint(1, RUN_BLOCKS_MAX))
        durable = chance.random() < DURABLE_SHARE
        return keys, Durability.DURABLE if durable else Durability.MEMORY, self._trace.end

    def _told(self, keys: list[BlockKey], answer: CommitResult, durability: Durability, since: int) -> None:
        good = [key for key, outcome in zip(keys, answer.outcomes, strict=True) if outcome is Outcome.HIT]
        with self._known.lock:
            self._tally.blocks_refused += len(keys) - len(good)
            if durability is Durability.MEMORY:
                self._known.soft |= dict.fromkeys(good, since)
                return
            self._known.witness(good, since)
            self._tally.acks += bool(good)
            self._tally.blocks_acknowledged += len(good)
            self._tally.blocks_acknowledged_again += sum(answer.existed)

    def _chain(self, chance: random.Random) -> int:
        """A new chain, one of the last few, which others may be putting now, or any."""
        known = self._known
        with known.lock:
            if chance.random() < NEW_SHARE or not known.chains:
                known.chains += 1
                return known.chains - 1
            first = known.chains - RECENT_CHAINS if chance.random() < 0.7 else 0
            return chance.randrange(max(0, first), known.chains)

    def _get(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        keys = self._some(chance, 4)
        self.compare(keys, client.get(namespace, keys).payloads)

    def _remove(self, client: Client, namespace: NamespaceId, chance: random.Random) -> None:
        keys = self._some(chance, 2)
        with self._known.lock:
            self._known.ask(keys)
        outcomes = client.remove(namespace, keys)
        with self._known.lock:
            self._tally.removals_acknowledged += outcomes.count(Outcome.HIT)

    def _flush(self, client: Client, _namespace: NamespaceId, _chance: random.Random) -> None:
        """What was acknowledged in memory before is durable then; where not all can be, the answer says so."""
        with self._known.lock:
            soft = dict(self._known.soft)
        try:
            client.flush()
        except Unavailable as error:
            if not str(error).startswith(NOT_ALL):
                raise
            with self._known.lock:
                self._tally.flushes_refused += 1
            return
        with self._known.lock:
            for key, since in soft.items():
                self._known.witness([key], since)
            self._tally.flushes += 1
            self._tally.blocks_flushed += len(soft)
            for key in soft.keys() & self._known.soft.keys():
                if self._known.soft[key] == soft[key]:
                    del self._known.soft[key]

    def _some(self, chance: random.Random, count: int) -> list[BlockKey]:
        with self._known.lock:
            return chance.sample(list(self._known.durable), min(count, len(self._known.durable)))

    def compare(self, keys: list[BlockKey], payloads: tuple[memoryview | None, ...]) -> None:
        """Count what was read, and what of it is not what was written."""
        read = [(key, payload) for key, payload in zip(keys, payloads, strict=True) if payload is not None]
        wrong = sum(payload != payload_of(key) for key, payload in read)
        with self._known.lock:
            self._tally.reads_checked += len(read)
            self._tally.corrupt += wrong
