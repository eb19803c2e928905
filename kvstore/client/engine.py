"""The client for inference engines: blocks go between the store and where an engine keeps them, and nothing waits.

An engine's scheduler and workers run in steps that must not be held up, and a failed cache must be no worse than none.
So everything here answers misses while the daemon is away or hangs, connects in the background, and ends what it began
by its deadline. It is a front of ``AsyncClient`` in a thread of its own (``engine_loop.py``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.client.engine_loop import EngineLoop
from kvstore.client.options import ClientOptions
from kvstore.client.options import Target as Address
from kvstore.client.payloads import PutBlocks, slot_bytes
from kvstore.client.pieces import LoadPlan, Pieces, StorePlan
from kvstore.client.storing import Outcomes, Storing
from kvstore.client.transfers import Found, Transfer
from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable, UnknownNamespace
from kvstore.core.keys import parents_of
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import BlockKey, Durability, NamespaceId, Outcome, Reason
from kvstore.wire.verbs.base import KnownNamespace

DEADLINE_SECONDS: Final = 1.0
COMMIT_SECONDS: Final = 10.0
"""How long a commit may take: into a full HOST it waits for SSD, and no step waits for it."""

_CLIENTS: Final[weakref.WeakSet[EngineClient]] = weakref.WeakSet()


class EngineClient:
    """A session for an engine on the daemon's host; thread-safe. No failure of the cache raises.

    ``deadline_s`` is how long a call may go unanswered, and how long a load waits for SSD unless it names a time
    itself; so it is the longest that a daemon that hangs holds up the engine, once. ``options`` are those of every
    client, but for ``strict`` and ``timeout_s``. The constructor does not connect: ``wait_ready`` waits for that.
    """

    def __init__(
        self,
        target: str | Path,
        options: ClientOptions | None = None,
        *,
        deadline_s: float = DEADLINE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        given = options or ClientOptions(name="engine", device=False)
        if Address.parse(target).address:
            raise InvalidArgument("target", str(target), "the path of a session socket: engines share memory with it")
        if not given.buffer_bytes:
            raise InvalidArgument("buffer_bytes", 0, "above 0: what is stored goes through the buffer")
        self.deadline_s = deadline_s
        self._target, self._options, self._clock = target, replace(given, timeout_s=deadline_s), clock
        self._known: dict[NamespaceId, KnownNamespace] = {}
        self._lock = threading.Lock()
        """Guards the thread's beginning, and end."""
        self._loop: EngineLoop | None = None
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._finished: deque[Transfer] = deque()
        self._under_way: set[Transfer] = set()
        self._storing = Storing()
        _CLIENTS.add(self)
        self._begin()

    # ------------------------------------------------------------ what it is

    @property
    def usable(self) -> bool:
        """Whether the daemon is connected and answers. Never waits."""
        loop = self._loop
        return loop is not None and loop.usable

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the first connection is there; for an engine's start. True if it is usable."""
        loop = self._begin()
        return loop is not None and loop.up.wait(timeout_s)

    def failures(self) -> dict[str, int]:
        """Failures that were answered as misses, by "Method:REASON"."""
        loop = self._loop
        return loop.client.failures() if loop is not None else {}

    def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> NamespaceId:
        """Make a namespace known: on this connection, and on each later one before anything else is asked of it.

        Without a connection it waits for nothing. Raises InvalidArgument for a spec that does not fit.
        """
        layout = BlockLayout.of(spec)
        known = KnownNamespace(spec, name, policy, layout, slot_bytes(layout))
        namespace_id = spec.namespace_id
        self._known[namespace_id] = known
        loop = self._begin()
        if loop is not None:
            loop.remember(known)
            if loop.usable:
                loop.submit(self._open(loop, known)).result()
        return namespace_id

    # ------------------------------------------------------------ calls

    def lookup(
        self, namespaces: Sequence[NamespaceId], keys: Sequence[Sequence[BlockKey]], *, hold: bool = False
    ) -> Found:
        """The run of blocks, from the first key on, that all namespaces have; ``keys[i]`` are those in namespace ``i``.

        An engine of several shards asks for all of them at one time. With ``hold`` no block of the run is dropped until
        ``release``, so that a worker can load it. Waits for one answer, ``deadline_s`` at most.
        """
        if len(namespaces) != len(keys) or len({len(one) for one in keys}) > 1:
            raise InvalidArgument("keys", [len(one) for one in keys], "one list of equal length a namespace")
        for namespace_id in namespaces:
            self._layout(namespace_id)
        loop = self._begin()
        if loop is None or not loop.usable or not keys or not keys[0]:
            return Found(None, self._release)
        return loop.submit(self._lookup(loop, list(zip(namespaces, keys, strict=True)), hold)).result()

    def load(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], into: Pieces, deadline_s: float | None = None
    ) -> Transfer:
        """Begin to copy blocks to where ``into`` says, waiting ``deadline_s`` at most for those that lie on SSD.

        HIT where a block is whole and was its own to the end of the copy; else what its pieces hold is not defined.
        What HOST can not pin at one time is loaded in windows. Returns at once. Raises InvalidArgument for what does
        not fit.
        """
        plan = LoadPlan.from_pieces(self._layout(namespace_id), len(keys), into)
        if self._known[namespace_id].spec.codec != "raw":
            raise InvalidArgument("namespace_id", self._known[namespace_id].spec.codec, "a namespace of raw blocks")
        transfer = Transfer(namespace_id, keys)
        loop = self._usable(transfer)
        if loop is not None:
            wait_ms = round(1000 * (self.deadline_s if deadline_s is None else deadline_s))
            loop.submit(self._load(loop, transfer, plan, wait_ms))
        return transfer

    def store(  # noqa: PLR0913  a keyword a choice
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey] | None,
        source: Pieces,
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        later: bool = False,
    ) -> Transfer:
        """Begin to store blocks, parents first. Returns once what fits is in the session's buffer: see ``taken``.

        With ``later`` it returns at once, and the memory is the store's until the transfer has ended. Without
        ``parents`` the keys are one chain from its root on. A key that is there twice, or is being stored now, is
        copied once. Raises InvalidArgument for what does not fit.
        """
        told = parents_of(keys) if parents is None else parents
        layout, transfer = self._layout(namespace_id), Transfer(namespace_id, keys)
        StorePlan.from_pieces(layout, PutBlocks(keys, told, (), token_ids, durability), source)
        fresh = self._storing.begin(transfer)
        loop = self._usable(transfer)
        if loop is None:
            self._end_store(transfer, {}, fresh)
            return transfer
        each = len(token_ids) // max(len(keys), 1)
        blocks = PutBlocks(
            [keys[i] for i in fresh],
            [told[i] for i in fresh],
            (),
            [token for i in fresh for token in token_ids[i * each : (i + 1) * each]],
            durability,
        )
        filled = threading.Event()
        loop.submit(
            self._store(loop, (transfer, fresh), StorePlan.from_pieces(layout, blocks, source.take(fresh)), filled)
        )
        while not later and not filled.wait(1.0) and loop.alive:
            pass
        return transfer

    def find(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Transfer:
        """Begin to ask, for each key by itself, whether its block is there: HIT or MISS. Returns at once."""
        self._layout(namespace_id)
        transfer = Transfer(namespace_id, keys)
        loop = self._usable(transfer)
        if loop is not None:
            loop.submit(self._find(loop, transfer))
        return transfer

    def step(self) -> list[Transfer]:
        """Transfers that have ended since the last time. Never connects and never waits."""
        if not self._finished:
            # Nearly always, once a step of the engine: the bell rings after what it tells of is here.
            return []
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        ended = []
        while self._finished:
            ended.append(self._finished.popleft())
        return ended

    def fileno(self) -> int:
        """A descriptor to poll: readable when ``step`` has something. The same one for as long as the client lives."""
        return self._bell

    def close(self) -> None:
        """End the session; what is under way ends as misses. Idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
            closed, self._closed = self._closed, True
        if loop is not None:
            loop.close()
        if not closed:
            for transfer in list(self._under_way):
                self._miss(transfer, Unavailable("the client is closed"))
            os.close(self._bell)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ on the loop

    async def _open(self, loop: EngineLoop, known: KnownNamespace) -> None:
        operations = loop.client.operations
        try:
            await loop.client.drive(
                loop.client.flows.attempt(operations.open_namespace(known.spec, known.name, known.policy))
            )
        except KVStoreError as error:
            loop.failed("Cache/OpenNamespace", error)

    async def _lookup(self, loop: EngineLoop, asked: list[tuple[NamespaceId, Sequence[BlockKey]]], hold: bool) -> Found:
        try:
            looked = await loop.client.drive(loop.client.flows.lookups.lookup(asked, hold))
        except KVStoreError as error:
            loop.failed("Cache/Match", error)
            return Found(None, self._release)
        found = Found(looked, self._release)
        if looked.lease is not None:
            loop.keep(found)
        return found

    def _release(self, found: Found) -> None:
        loop = self._loop
        if loop is not None and found.lease is not None:
            loop.post(loop.let_go, found)

    async def _load(self, loop: EngineLoop, transfer: Transfer, plan: LoadPlan, wait_ms: int) -> None:
        flow = loop.client.flows.gets.load(transfer.namespace_id, transfer.keys, plan, wait_ms)
        try:
            outcomes, reasons = await loop.client.drive(flow)
        except KVStoreError as error:
            loop.failed("Cache/Fetch", error)
            self._miss(transfer, error)
        else:
            self._end(transfer, outcomes, reasons)
        finally:
            if not transfer.done():
                self._miss(transfer, Unavailable("the client is closed"))

    async def _find(self, loop: EngineLoop, transfer: Transfer) -> None:
        try:
            there = await loop.client.drive(loop.client.flows.lookups.find(transfer.namespace_id, transfer.keys))
        except KVStoreError as error:
            loop.failed("Leases/HoldLease", error)
            self._miss(transfer, error)
        else:
            self._end(transfer, [Outcome.HIT if one else Outcome.MISS for one in there], [Reason.NONE] * len(there))
        finally:
            if not transfer.done():
                self._miss(transfer, Unavailable("the client is closed"))

    async def _store(
        self, loop: EngineLoop, what: tuple[Transfer, list[int]], plan: StorePlan, filled: threading.Event
    ) -> None:
        transfer, fresh = what
        put = loop.client.flows.puts.one_round(transfer.namespace_id, plan, COMMIT_SECONDS)
        outcomes: Outcomes = {}
        try:
            alone = self._storing.count == len(fresh)
            taken = await loop.client.drive(put.fill()) if fresh else 0
            transfer.taken = len(transfer.keys) if taken == len(fresh) else fresh[taken]
            # With nothing under way no room will come by itself.
            left = (Outcome.MISS if alone and not taken else Outcome.BUSY, Reason.NO_SPACE)
            outcomes = dict.fromkeys(fresh[taken:], left)
            self._storing.forget(transfer, [transfer.keys[i] for i in fresh[taken:]])
            filled.set()
            # Its turn comes after the stores that were begun before, whose keys it may have, too.
            async with loop.order:
                committed = await loop.client.drive(put.publish()) if taken else None
            if committed is not None:
                outcomes.update(zip(fresh, zip(committed.outcomes, committed.reasons, strict=True), strict=False))
        except KVStoreError as error:
            loop.failed("Cache/Commit", error)
            transfer.error = error
        finally:
            put.give_back()
            self._end_store(transfer, outcomes, fresh)
            filled.set()

    # ------------------------------------------------------------ ends of transfers

    def _end_store(self, transfer: Transfer, outcomes: Outcomes, fresh: Sequence[int]) -> None:
        told = self._storing.end(transfer, outcomes, fresh)
        self._end(transfer, [outcome for outcome, _ in told], [reason for _, reason in told])

    def _usable(self, transfer: Transfer) -> EngineLoop | None:
        """The loop, if it can carry out a transfer now; else the transfer has ended as misses."""
        loop = self._begin()
        self._under_way.add(transfer)
        if loop is not None and loop.usable:
            return loop
        self._miss(transfer, Unavailable("the daemon is away or does not answer"))
        return None

    def _miss(self, transfer: Transfer, error: KVStoreError) -> None:
        transfer.error = error
        count = len(transfer.keys)
        self._end(transfer, [Outcome.MISS] * count, [Reason.TIER_UNAVAILABLE] * count)

    def _end(self, transfer: Transfer, outcomes: Sequence[Outcome], reasons: Sequence[Reason]) -> None:
        if transfer.done():
            return
        transfer.end(outcomes, reasons)
        self._under_way.discard(transfer)
        self._finished.append(transfer)
        if not self._closed:
            os.eventfd_write(self._bell, 1)

    # ------------------------------------------------------------ the thread

    def _layout(self, namespace_id: NamespaceId) -> BlockLayout:
        known = self._known.get(namespace_id)
        if known is None:
            raise UnknownNamespace(
                f"namespace {bytes(namespace_id).hex()[:16]} was not opened by this client",
                field="namespace_id",
                value=bytes(namespace_id).hex(),
                expected="an id that open_namespace of this client answered",
            )
        return known.layout

    def _begin(self) -> EngineLoop | None:
        """The thread's loop, begun if it has not; None once the client is closed."""
        loop = self._loop
        if loop is None and not self._closed:
            with self._lock:
                if self._loop is None and not self._closed:
                    loop = EngineLoop(self._target, self._options, self._clock)
                    for known in self._known.values():
                        loop.remember(known)
                    self._loop = loop
        return loop

    def forked(self) -> None:
        """In the child of a fork, where the thread does not live: what was under way is the parent's."""
        self._lock = threading.Lock()
        self._loop = None
        if self._closed:
            return
        # The descriptor keeps its number, but rings for this process alone.
        own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        os.dup2(own, self._bell, inheritable=False)
        os.close(own)
        self._finished.clear()
        self._storing = Storing()
        for transfer in list(self._under_way):
            self._miss(transfer, Unavailable("the process was forked"))


def _forked() -> None:
    for client in list(_CLIENTS):
        client.forked()


os.register_at_fork(after_in_child=_forked)
