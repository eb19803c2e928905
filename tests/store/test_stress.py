"""Many threads on one store that is too small for them: nothing is torn, lost by accident or left over."""

from __future__ import annotations

import random
import threading
import traceback

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.errors import KVStoreError
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.types import Outcome, Target, Tier, WritePolicy
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.session import Session
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import STORED, World

MARKS = Watermarks(high=0.9, low=0.7)


class Client:
    """One thread's session: puts, gets, leases and dies, by a seed. Keeps what went wrong."""

    def __init__(self, world: World, seed: int, rounds: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.rounds = rounds
        self.seed = seed
        self.hits = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        try:
            cache = self.session()
            for _ in range(self.rounds):
                self.chance.choice([self.put, self.put_on_device, self.get, self.get, self.remove])(cache)
                if self.chance.random() < 0.02:
                    cache.close()
                    cache = self.session()
            cache.close()
        except Exception:  # noqa: BLE001  a thread has nobody else to tell
            self.wrong.append(traceback.format_exc())

    def session(self) -> Session:
        return self.world.session(f"client {self.seed}", buffer_bytes=64 * 4096)

    def keys(self):
        tokens = [self.chance.randrange(6)] * 16 + [self.chance.randrange(4)] * 32
        return chain_keys(self.world.namespace_id, tokens[: 8 * self.chance.randint(1, 6)], 8)

    def put(self, cache):
        self.store_blocks(cache, Tier.HOST)

    def put_on_device(self, cache):
        self.store_blocks(cache, Tier.DEVICE)

    def store_blocks(self, cache, tier):
        keys = self.keys()
        found = cache.reserve(self.world.namespace_id, tier, keys=keys)
        entries = []
        rows = zip(keys, parents_of(keys), found.reservation_ids, found.places, strict=True)
        for key, parent, number, place in rows:
            if place is not None:
                self.world.write(cache.memory(place.area), place, key)
                entries.append(CommitEntry(number, key, parent))
        if self.chance.random() < 0.1:
            cache.abort([entry.reservation_id for entry in entries])
        else:
            cache.commit(self.world.namespace_id, entries)

    def get(self, cache):
        keys = self.keys()
        target = self.chance.choice(list(Target))
        lease = cache.grant_lease("stress", 60_000)
        found = cache.fetch(self.world.namespace_id, keys, target, lease_id=lease, wait_ms=30_000)
        for key, outcome, place in zip(keys, found.outcomes, found.places, strict=True):
            if outcome is Outcome.HIT:
                self.hits += 1
                if place is None or not self.world.read(cache, place, key):
                    self.wrong.append(f"wrong bytes for {key.hex()} at {place} ({target.name})")
            elif outcome is Outcome.PENDING:
                self.wrong.append("a job took longer than 30 s")
        if self.chance.random() < 0.9:
            cache.release(lease)

    def remove(self, cache):
        if self.chance.random() < 0.3:
            cache.remove(self.world.namespace_id, self.keys()[-2:])


@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_threads_on_a_store_that_is_too_small(make_world, policy):
    stress(make_world, policy, rounds=120)


@pytest.mark.slow
@pytest.mark.parametrize("policy", WritePolicy)
def test_threads_for_long(make_world, policy):
    stress(make_world, policy, rounds=4000)


def stress(make_world, policy, rounds):
    disk = MemoryDisk(40 * STORED)
    config = StoreConfig(device=MARKS, host=MARKS, ssd=MARKS, tick_ms=5)
    world = make_world(
        host_blocks=24, device_blocks=12, disk=disk, threads=2, write=policy, config=config, buffer_bytes=1 << 16
    )
    clients = [Client(world, seed, rounds) for seed in range(3)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert [problem for client in clients for problem in client.wrong] == []
    assert sum(client.hits for client in clients) > rounds // 2
    counters = world.store.status().counters
    assert not any(name.startswith("mover_restarts") for name in counters), counters
    assert counters.get("corrupt_blocks", 0) == 0
    world.store._movers.stop()
    world.run()
    assert violations(world.store) == []
    status = world.store.status()
    assert (status.leases, status.reservations, status.jobs) == (0, 0, 0)
    assert all(counters[name] == 0 for name in ("copies_pinned", "blocks_held"))
    assert {t: getattr(world.store._state._book, t) for t in ("io", "refs", "fills", "doomed")} == {
        "io": {}, "refs": {}, "fills": {}, "doomed": {},
    }  # fmt: skip


def test_a_store_that_ends_while_clients_work(make_world):
    world = make_world(disk=MemoryDisk(), threads=1)
    clients = [Client(world, seed, 10_000) for seed in range(2)]
    stopped = threading.Event()

    def work(client):
        cache = client.session()
        try:
            while not stopped.is_set():
                client.put(cache)
        except KVStoreError:
            stopped.set()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for client in clients:
        client.world.cache.close()
    world.store._tenancy.close_all()
    stopped.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert violations(world.store) == []
