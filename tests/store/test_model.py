"""Random calls against a store so simple that it is right: a set of keys. The disk is the real tier over a faulty one.

SSD has room for everything, so nothing is ever lost for space: after every call what is resident is exactly what was
committed and not removed. After a crash, what was acknowledged as durable is there and nothing that was never
committed is; what was removed may be back, if no sync had passed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kvstore.cache import CommitEntry
from kvstore.core.keys import chain_keys
from kvstore.core.types import ROOT_PARENT, Area, Durability, Outcome, Target, Tier, WritePolicy
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.testing.invariants import violations
from kvstore.testing.world import World
from kvstore.tiers.ssd import SsdConfig, SsdTier

HIT, MISS, PENDING, BUSY = Outcome.HIT, Outcome.MISS, Outcome.PENDING, Outcome.BUSY
SSD_CONFIG = SsdConfig(
    capacity_bytes=64 << 20, segment_bytes=1 << 20, commit_interval_s=None, compact_interval_s=None,
    read_threads=1, write_threads=1, read_bytes_in_flight=4 << 20, write_bytes_in_flight=4 << 20,
)  # fmt: skip
CHAINS = 4
DEPTH = 6
MARKS = Watermarks(high=0.9, low=0.6)

DONE = Counter()
"""What all runs did together."""

chains = st.integers(0, CHAINS - 1)
lengths = st.integers(1, DEPTH)
rarely = st.integers(0, 2)
"""A rule that would wipe out too much does nothing but for 0."""
targets = st.sampled_from([Target.IN_PLACE, Target.DEVICE, Target.HOST, Target.BUFFER])


class StoreMachine(RuleBasedStateMachine):
    """One store, two sessions. Chain c is a path in a tree in which chains 0 and 1, and 2 and 3, share two blocks."""

    reservations = Bundle("reservations")
    leases = Bundle("leases")
    jobs = Bundle("jobs")

    @initialize(policy=st.sampled_from(WritePolicy), host=st.integers(6, 12), device=st.integers(3, 6))
    def open(self, policy, host, device):
        self.policy = WritePolicy.BACK if policy is WritePolicy.SECOND_HIT else policy
        self.sizes = {"host_blocks": host, "device_blocks": device}
        self.port = FaultyDisk()
        self.committed = set()
        self.durable = set()
        self.removed_unsynced = set()
        self.start()

    def start(self):
        disk = SsdTier("memory", SSD_CONFIG, port=self.port)
        config = StoreConfig(device=MARKS, host=MARKS, extent_blocks_max=4)
        self.world = World(disk=disk, write=self.policy, config=config, buffer_bytes=24 * 4096, **self.sizes)
        self.store = self.world.store
        self.sessions = [self.world.cache, self.world.session("second", buffer_bytes=24 * 4096)]
        self.open_reservations = {}
        self.open_leases = {}
        self.boot = getattr(self, "boot", 0) + 1

    def teardown(self):
        if hasattr(self, "world"):
            counters = self.store.status().counters
            for name in ("host_evicted", "device_evicted", "host_demoted", "device_demoted", "ssd_promoted"):
                DONE[name] += counters.get(name, 0)
            self.world.close()

    def path(self, chain):
        tokens = [chain // 2 + 1] * 16 + [chain + 100] * (8 * (DEPTH - 2))
        return chain_keys(self.world.namespace_id, tokens, 8)

    # -- writing -------------------------------------------------------------------------------------------------

    @rule(target=reservations, who=st.integers(0, 1), chain=chains, length=lengths, tier=st.sampled_from([1, 2]))
    def reserve(self, who, chain, length, tier):
        keys = self.path(chain)[:length]
        cache = self.sessions[who]
        found = cache.reserve(self.world.namespace_id, Tier(tier), keys=keys)
        made = []
        for key, outcome, number, place in zip(keys, found.outcomes, found.reservation_ids, found.places, strict=True):
            assert (outcome is HIT) == (key in self.committed)
            if outcome is PENDING:
                self.world.write(cache.memory(place.area), place, key)
                self.open_reservations[number] = (who, key)
                made.append((self.boot, number))
            else:
                assert place is None
        if BUSY in found.outcomes:
            assert found.busy.needed_bytes > 0
        return multiple(*made)

    @rule(numbers=st.lists(consumes(reservations), min_size=1, max_size=6), durable=st.booleans(), chain=chains)
    def commit(self, numbers, durable, chain):
        known = {
            n: self.open_reservations.pop(n) for boot, n in numbers if boot == self.boot and n in self.open_reservations
        }
        for who in (0, 1):
            owned = {key: n for n, (owner, key) in known.items() if owner == who}
            # Two reservations of one key do not go in one commit; the later one is kept.
            self.sessions[who].abort([n for n, (owner, _) in known.items() if owner == who and n not in owned.values()])
            entries = [CommitEntry(owned[key], key, self.parent(key)) for key in sorted(owned, key=self.depth)]
            if entries:
                self.commit_entries(who, entries, durable)

    @rule(who=st.integers(0, 1), chain=chains, length=lengths, tier=st.sampled_from([1, 2]), durable=st.booleans())
    def put(self, who, chain, length, tier, durable):
        self.reserve(who, chain, length, tier)
        keys = self.path(chain)[:length]
        numbers = {key: n for n, (owner, key) in self.open_reservations.items() if owner == who and key in keys}
        for number in numbers.values():
            del self.open_reservations[number]
        entries = [CommitEntry(numbers[key], key, self.parent(key)) for key in keys if key in numbers]
        self.commit_entries(who, entries, durable)

    def commit_entries(self, who, entries, durable):
        DONE["commits"] += 1
        done = self.sessions[who].commit(
            self.world.namespace_id, entries, durability=Durability.DURABLE if durable else Durability.MEMORY
        )
        for entry, outcome, existed in zip(entries, done.outcomes, done.existed, strict=True):
            possible = entry.parent == ROOT_PARENT or entry.parent in self.committed
            if not possible:
                assert outcome is MISS
            elif entry.key in self.committed:
                assert (outcome, existed) == (HIT, True)
            else:
                # BUSY only where HOST is full of what can not go.
                assert outcome in (HIT, BUSY)
                assert not existed
            if outcome is HIT:
                self.committed.add(entry.key)
                self.removed_unsynced.discard(entry.key)
                if durable:
                    self.durable.update(self.lineage(entry.key))
        if durable and HIT in done.outcomes:
            self.removed_unsynced.clear()

    @rule(numbers=st.lists(consumes(reservations), min_size=1, max_size=3))
    def abort(self, numbers):
        for boot, number in numbers:
            if boot == self.boot and number in self.open_reservations:
                who, _ = self.open_reservations.pop(number)
                assert self.sessions[1 - who].abort([number]) == 0
                assert self.sessions[who].abort([number]) == 1

    # -- reading -------------------------------------------------------------------------------------------------

    @rule(chain=chains, length=lengths)
    def match(self, chain, length):
        keys = self.path(chain)[:length]
        found = self.sessions[0].match(self.world.namespace_id, keys)
        run = list(itertools.takewhile(lambda key: key in self.committed, keys))
        assert found.matched == len(run)
        assert all(found.residency)

    @rule(target=leases, who=st.integers(0, 1), ttl=st.sampled_from([1000, 5000]))
    def grant(self, who, ttl):
        number = self.sessions[who].grant_lease("model", ttl)
        self.open_leases[number] = [who, self.world.clock.now() + ttl / 1000, ttl, set()]
        return (self.boot, number)

    @rule(target=jobs, lease=leases, chain=chains, length=lengths, where=targets, now=st.booleans())
    def fetch(self, lease, chain, length, where, now):
        number = self.live(lease)
        if number is None:
            return multiple()
        who, _, _, kept = self.open_leases[number]
        keys = self.path(chain)[:length]
        cache = self.sessions[who]
        found = cache.fetch(self.world.namespace_id, keys, where, lease_id=number)
        for key, outcome in zip(keys, found.outcomes, strict=True):
            assert (outcome is MISS) == (key not in self.committed)
        self.check(cache, keys, found, kept, where)
        if not found.job_id:
            return multiple()
        job = (self.boot, found.job_id, number, keys, where)
        if now:
            self.world.run()
            self.finish(job)
            return multiple()
        return job

    @rule(who=st.integers(0, 1), chain=chains, where=targets, keep=st.booleans())
    def get(self, who, chain, where, keep):
        """All of a chain at once, under a lease of its own."""
        lease = self.grant(who, 1000)
        self.fetch(lease, chain, DEPTH, where, now=True)
        if not keep:
            self.release(lease)

    @rule(chain=chains, where=targets)
    def put_and_get(self, chain, where):
        """The common case, so that it is common here, too."""
        self.put(0, chain, DEPTH, 2, durable=False)
        self.get(0, chain, where, keep=False)

    @rule(job=consumes(jobs))
    def finish(self, job):
        boot, number, lease, keys, where = job
        if boot != self.boot or lease not in self.open_leases:
            return
        who, _, _, kept = self.open_leases[lease]
        self.world.run()
        done = self.sessions[who].wait_job(number, 0)
        if self.live((boot, lease)) is not None:
            self.check(self.sessions[who], keys, done, kept, where)
            assert PENDING not in done.outcomes

    def check(self, cache, keys, found, kept, where):
        for key, outcome, place in zip(keys, found.outcomes, found.places, strict=True):
            if outcome is HIT:
                DONE[f"hits {where.name}"] += 1
                assert self.world.read(cache, place, key)
                wanted = {Target.DEVICE: (Area.DEVICE,), Target.BUFFER: (Area.BUFFER,), Target.HOST: (Area.HOST,)}
                assert place.area in wanted.get(where, (Area.DEVICE, Area.HOST))
                if where is not Target.BUFFER:
                    kept.add(key)

    @rule(chain=chains, length=lengths, tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def prefetch(self, chain, length, tier):
        keys = self.path(chain)[:length]
        found = self.sessions[0].prefetch(self.world.namespace_id, keys, tier)
        assert [o is MISS for o in found.outcomes] == [key not in self.committed for key in keys]
        if found.job_id:
            self.world.run()
            assert PENDING not in self.sessions[0].wait_job(found.job_id, 0).outcomes

    @rule(lease=leases, chain=chains, length=lengths)
    def hold(self, lease, chain, length):
        number = self.live(lease)
        if number is not None:
            who, _, _, kept = self.open_leases[number]
            keys = self.path(chain)[:length]
            held = self.sessions[who].hold(number, self.world.namespace_id, keys)
            assert held == tuple(key in self.committed for key in keys)
            kept.update(key for key, yes in zip(keys, held, strict=True) if yes)

    @rule(lease=leases)
    def renew(self, lease):
        number = self.live(lease)
        if number is not None:
            self.sessions[self.open_leases[number][0]].renew_lease(number)
            self.open_leases[number][1] = self.world.clock.now() + self.open_leases[number][2] / 1000

    @rule(lease=consumes(leases))
    def release(self, lease):
        number = self.live(lease)
        if number is not None:
            self.sessions[self.open_leases.pop(number)[0]].release(number)

    # -- losing --------------------------------------------------------------------------------------------------

    @rule(chain=chains, length=lengths)
    def remove(self, chain, length):
        keys = self.path(chain)[DEPTH - length :]
        kept = set().union(*(lease[3] for lease in self.open_leases.values())) if self.open_leases else set()
        busy = self.in_jobs()
        outcomes = self.sessions[0].remove(self.world.namespace_id, keys)
        for key, outcome in zip(keys, outcomes, strict=True):
            if key not in self.committed:
                assert outcome is MISS
            elif key in kept or key in busy:
                assert outcome is BUSY
            else:
                assert outcome is HIT
                self.committed.discard(key)
                self.durable.discard(key)
                self.removed_unsynced.add(key)

    @rule(tier=st.sampled_from(Tier), blocks=st.integers(1, 4))
    def evict(self, tier, blocks):
        if tier is not Tier.SSD:
            self.store.evict(tier, nbytes=blocks * 4096)

    @rule(seconds=st.sampled_from([0.4, 2.0]))
    def wait(self, seconds):
        self.world.clock.advance(seconds)
        self.expire()
        self.world.run()

    @rule()
    def work(self):
        self.world.run()

    @rule()
    def flush(self):
        self.sessions[0].flush()
        self.durable |= self.committed
        self.removed_unsynced.clear()

    @rule(chance=rarely)
    def second_session_dies(self, chance):
        if chance:
            return
        self.sessions[1].close()
        self.open_reservations = {n: r for n, r in self.open_reservations.items() if r[0] == 0}
        self.open_leases = {n: x for n, x in self.open_leases.items() if x[0] == 0}
        self.sessions[1] = self.world.session("second", buffer_bytes=24 * 4096)

    @rule(chance=rarely, mode=st.sampled_from(Crash), seed=st.integers(0, 1000))
    def crash_and_reopen(self, chance, mode, seed):
        if chance:
            return
        DONE["crashes"] += 1
        DONE["blocks before a crash"] += len(self.committed)
        old, port = self.world, self.port
        self.port = port.crash(mode, seed)
        old.store._state.config = replace(old.config, close_flush_ms=0)
        old.close()
        self.start()
        allowed = self.committed | self.removed_unsynced
        resident = {key for key in self.every_key() if self.is_resident(key)}
        assert resident <= allowed
        assert self.durable <= resident
        self.committed = resident
        self.removed_unsynced = set()

    # -- the model's own arithmetic ------------------------------------------------------------------------------

    def every_key(self):
        return {key for chain in range(CHAINS) for key in self.path(chain)}

    def is_resident(self, key):
        return self.sessions[0].match(self.world.namespace_id, [key]).matched == 1

    def lineage(self, key):
        for chain in range(CHAINS):
            keys = self.path(chain)
            if key in keys:
                return keys[: keys.index(key) + 1]
        raise KeyError(key)

    def parent(self, key):
        line = self.lineage(key)
        return line[-2] if len(line) > 1 else ROOT_PARENT

    def depth(self, key):
        return len(self.lineage(key))

    def expire(self):
        now = self.world.clock.now()
        self.open_leases = {n: x for n, x in self.open_leases.items() if x[1] > now}

    def live(self, lease):
        self.expire()
        boot, number = lease
        return number if boot == self.boot and number in self.open_leases else None

    def in_jobs(self):
        """Keys that a job under way keeps."""
        with self.store._state.locked() as book:
            return {book.index.key_of(slot) for slot in book.holds}

    @invariant()
    def nothing_is_lost_or_made_up(self):
        if hasattr(self, "world"):
            assert {key for key in self.every_key() if self.is_resident(key)} == self.committed

    @invariant()
    def the_books_balance(self):
        if hasattr(self, "world"):
            assert violations(self.store) == []


QUICK = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
TestStore.settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_model_for_long():
    run_machine(StoreMachine, settings=settings(QUICK, max_examples=600, derandomize=False))


def test_the_runs_did_what_they_are_for():
    """Runs after the machine: a model that never commits or never evicts proves nothing."""
    wanted = {"commits": 100, "crashes": 5, "blocks before a crash": 20}
    wanted |= {f"hits {target.name}": 10 for target in Target}
    wanted |= dict.fromkeys(("host_evicted", "device_evicted", "ssd_promoted"), 10)
    assert {name: DONE[name] for name in wanted if DONE[name] < wanted[name]} == {}
