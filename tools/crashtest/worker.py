"""The process that is killed: writers, readers, a dropper and a compactor on one SSD tier."""

from __future__ import annotations

import os
import random
import threading
import traceback
from collections.abc import Callable
from typing import Final

from kvstore.core.errors import TierFull
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus
from kvstore.tiers.header import unpack_header
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tools.crashtest.events import RECORD, Event, pack

WRITERS: Final = 16
"""So many durable commits are under way at once, and share syncs."""
RUN_BLOCKS_MAX: Final = 6
DROP_BLOCKS: Final = 24
FAILED: Final = 70
"""Exit status of a worker that met an error instead of its kill."""
PIPE_RECORDS_MAX: Final = 4096 // RECORD.size


def is_right(maker: BlockMaker, seed: int, stored: memoryview) -> bool:
    """Whether a stored block is that of the seed: a first block of a chain, or the one behind the seed before."""
    header = unpack_header(stored)
    if header.key != maker.key(seed) or header.parent not in (ROOT_PARENT, maker.key(seed - 1)):
        return False
    return bytes(stored[maker.layout.header_bytes :]) == maker.payload(seed)


class Worker:
    """Shared state of the threads. The lock guards ``live`` and ``next_seed``."""

    def __init__(self, directory: str, config: SsdConfig, pipe: int, seeds: tuple[int, int]) -> None:
        self._maker = BlockMaker()
        self._pipe = pipe
        self._seed, self._next = seeds
        self._lock = threading.Lock()
        self._live: dict[int, DiskHandle] = {}
        self._tier = SsdTier(directory, config)

    def run(self) -> None:
        """Recover, tell that all is ready, and work until killed."""
        seed_of = {self._maker.key(seed): seed for seed in range(self._next)}
        self._live = {seed_of[one.key]: one.handle for one in self._tier.recover()}
        self._tier.put_namespace(self._maker.spec, NamespacePolicy(), "crashtest")
        self.tell(Event.READY, [len(self._live)])
        roles: list[tuple[Callable[[random.Random], None], float]] = [(self.write, 0.0)] * WRITERS
        roles += [(self.read, 0.005), (self.read, 0.005), (self.drop, 0.01), (self.compact, 0.02)]
        threads = [
            threading.Thread(target=self._repeat, args=(role, pause_s, random.Random(self._seed * 100 + index)))
            for index, (role, pause_s) in enumerate(roles)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def tell(self, event: Event, values: list[int]) -> None:
        """Send records; a pipe takes up to 4,096 bytes whole, and keeps them when this process dies."""
        for begin in range(0, len(values), PIPE_RECORDS_MAX):
            os.write(self._pipe, pack(event, values[begin : begin + PIPE_RECORDS_MAX]))

    def write(self, chance: random.Random) -> None:
        """A run of a new chain, durable or not."""
        count = chance.randint(1, RUN_BLOCKS_MAX)
        with self._lock:
            seeds = list(range(self._next, self._next + count))
            self._next += count
        blocks = self._maker.chain(seeds, ROOT_PARENT)
        durable = chance.random() < 0.8
        self.tell(Event.WRITING, seeds)
        try:
            handles = self._tier.write(self._maker.namespace_id, blocks, durable=durable)
        except TierFull:
            self._make_room(chance)
            return
        if durable:
            self.tell(Event.DURABLE, seeds)
            self.tell(Event.COMMIT, [count])
        with self._lock:
            self._live.update(zip(seeds, handles, strict=True))

    def read(self, chance: random.Random) -> None:
        """Some blocks that live, checked byte for byte."""
        with self._lock:
            seeds = chance.sample(sorted(self._live), min(8, len(self._live)))
            handles = [self._live[seed] for seed in seeds]
        keys = [self._maker.key(seed) for seed in seeds]
        into = [memoryview(bytearray(self._maker.layout.stored_bytes)) for _ in seeds]
        reads = [BlockRead(h, key, data) for h, key, data in zip(handles, keys, into, strict=True)]
        for seed, status, data in zip(seeds, self._tier.read(reads), into, strict=True):
            if status is ReadStatus.OK:
                self.tell(Event.CHECKED if is_right(self._maker, seed, data) else Event.WRONG, [seed])
            elif status is ReadStatus.CORRUPT:
                self.tell(Event.WRONG, [seed])

    def drop(self, chance: random.Random) -> None:
        """Now and then some blocks are removed, durably."""
        self._drop_some(chance, chance.randint(1, 4))
        self._tier.reclaim(1 << 16)

    def compact(self, chance: random.Random) -> None:
        """Rewrite what is a little fragmented."""
        report = self._tier.compact(chance.choice((0.1, 0.3)))
        if report.segments:
            self.tell(Event.REWRITTEN, [report.segments])

    def _make_room(self, chance: random.Random) -> None:
        self._drop_some(chance, DROP_BLOCKS)
        self._tier.reclaim(1 << 17)

    def _drop_some(self, chance: random.Random, count: int) -> None:
        with self._lock:
            seeds = sorted(self._live)[: 4 * count]
            seeds = chance.sample(seeds, min(count, len(seeds)))
            # Told under the lock: nobody else drops them, and none is dropped before it is told.
            self.tell(Event.DROPPING, seeds)
            handles = [self._live.pop(seed) for seed in seeds]
        self._tier.drop(handles)
        self._tier.flush()
        self.tell(Event.DROPPED, seeds)

    def _repeat(self, role: Callable[[random.Random], None], pause_s: float, chance: random.Random) -> None:
        # Pauses leave the processor to the writers, whose acknowledgements are what a kill can prove wrong.
        never = threading.Event()
        try:
            while not never.wait(pause_s * chance.random()):
                role(chance)
        except BaseException as error:  # noqa: BLE001 - a worker that fails is a finding: it dies loudly
            traceback.print_exception(error)
            os._exit(FAILED)
