"""A block is (namespace, key): tenants that name the same keys never see, block or capture each other."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import ROOT_PARENT, BlockKey, Durability, Outcome, Reason, Target, Tier
from kvstore.store.config import StoreConfig
from kvstore.testing.invariants import violations
from kvstore.testing.memory_disk import MemoryDisk
from kvstore.testing.world import SPEC, World

HIT, MISS, PENDING = Outcome.HIT, Outcome.MISS, Outcome.PENDING
SPECS = (replace(SPEC, salt=b"first"), replace(SPEC, salt=b"second", layers=2))
KEYS = [BlockKey(bytes([number]) * 32) for number in range(1, 9)]


class Tenant:
    """One namespace of a store, and blocks in it whose bytes follow from the namespace and the key."""

    def __init__(self, world, spec):
        self.world, self.spec, self.cache = world, spec, world.cache
        opened = world.cache.open_namespace(spec)
        self.namespace_id, self.layout = opened.namespace_id, opened.layout

    def bytes_of(self, key, layer):
        return (self.namespace_id[:16] + key[:15] + bytes([layer])) * (self.layout.raw_slice_bytes // 32)

    def put(self, key, parent=ROOT_PARENT, durability=Durability.MEMORY):
        found = self.cache.reserve(self.namespace_id, Tier.HOST, keys=[key], durability=durability)
        place = found.places[0]
        if place is None:
            return found.outcomes[0], True
        for layer in range(self.spec.layers):
            begin = place.offset + layer * place.stride
            self.cache.memory(place.area)[begin : begin + self.layout.raw_slice_bytes] = self.bytes_of(key, layer)
        entry = CommitEntry(found.reservation_ids[0], key, parent)
        done = self.cache.commit(self.namespace_id, [entry], durability=durability)
        return done.outcomes[0], done.existed[0]

    def get(self, key, target=Target.HOST):
        """The outcome; a HIT's bytes are compared."""
        lease = self.cache.grant_lease("get", 1000)
        found = self.cache.fetch(self.namespace_id, [key], target, lease_id=lease)
        if found.job_id:
            self.world.run()
            found = self.cache.wait_job(found.job_id, 1000)
        place = found.places[0]
        if place is not None:
            memory = self.cache.memory(place.area)
            for layer in range(self.spec.layers):
                begin = place.offset + layer * place.stride
                assert memory[begin : begin + self.layout.raw_slice_bytes] == self.bytes_of(key, layer)
        self.cache.release(lease)
        return found.outcomes[0]

    def has(self, key):
        return self.cache.match(self.namespace_id, [key]).matched == 1


@pytest.fixture
def tenants(world):
    return [Tenant(world, spec) for spec in SPECS]


def test_a_key_of_one_tenant_is_free_for_all_others(world, tenants):
    first, second = tenants
    assert first.put(KEYS[0], durability=Durability.DURABLE) == (HIT, False)
    assert (second.has(KEYS[0]), second.get(KEYS[0])) == (False, MISS)
    assert second.put(KEYS[0], durability=Durability.DURABLE) == (HIT, False)
    for tenant in tenants:
        assert tenant.get(KEYS[0]) is HIT
    world.store.evict(Tier.HOST, nbytes=1 << 20)
    for tenant in tenants:
        assert tenant.get(KEYS[0]) is HIT
    assert violations(world.store) == []


def test_a_parent_is_one_in_the_same_namespace_only(tenants):
    first, second = tenants
    first.put(KEYS[0])
    assert second.put(KEYS[1], parent=KEYS[0]) == (MISS, False)


def test_what_became_of_a_block_is_told_to_its_own_namespace_only(world, tenants):
    first, second = tenants
    first.put(KEYS[0])
    first.cache.remove(first.namespace_id, [KEYS[0]])
    assert first.cache.match(first.namespace_id, [KEYS[0]]).reason is Reason.REMOVED
    assert second.cache.match(second.namespace_id, [KEYS[0]]).reason is Reason.NEVER_STORED
    assert world.store.why(second.namespace_id, keys=[KEYS[0]]).reason is Reason.NEVER_STORED
    first.cache.reserve(first.namespace_id, Tier.HOST, keys=[KEYS[1]])
    assert first.cache.match(first.namespace_id, [KEYS[1]]).reason is Reason.UNCOMMITTED
    assert second.cache.match(second.namespace_id, [KEYS[1]]).reason is Reason.NEVER_STORED


def test_a_block_is_shown_by_its_whole_name(world, tenants):
    for tenant in tenants:
        tenant.put(KEYS[0])
    with pytest.raises(InvalidArgument, match="namespace"):
        world.store.show_block(KEYS[0])
    for tenant in tenants:
        assert world.store.show_block(KEYS[0], namespace_id=tenant.namespace_id).namespace_id == tenant.namespace_id
    assert [b.key for b in world.store.list_blocks(namespace_id=tenants[1].namespace_id).blocks] == KEYS[:1]


def test_pins_and_leases_name_blocks_of_one_namespace(world, tenants):
    first, second = tenants
    for tenant in tenants:
        tenant.put(KEYS[0])
        world.store.pin("keep", tenant.namespace_id, KEYS[:1])
    assert world.store.unpin("keep", first.namespace_id, KEYS[:1]) == 1
    assert first.cache.remove(first.namespace_id, KEYS[:1]) == (HIT,)
    assert second.cache.remove(second.namespace_id, KEYS[:1]) == (Outcome.BUSY,)
    lease = second.cache.grant_lease("both", 1000)
    first.put(KEYS[0])
    for tenant in tenants:
        tenant.cache.fetch(tenant.namespace_id, KEYS[:1], Target.HOST, lease_id=lease)
    assert first.cache.release(lease, first.namespace_id, KEYS[:1]) == 1
    assert second.cache.release(lease) == 1
    assert violations(world.store) == []


def test_a_verify_reads_the_blocks_of_all_namespaces(world, tenants):
    for tenant in tenants:
        tenant.put(KEYS[0], durability=Durability.DURABLE)
    assert (world.store.verify().blocks, world.store.verify().bad) == (2, 0)
    assert world.store.verify(namespace_id=tenants[0].namespace_id, keys=KEYS[:1]).blocks == 1


class TenantsMachine(RuleBasedStateMachine):
    """Two tenants that use the same few keys in every way, beside a set of (tenant, key) that is right."""

    @initialize(host=st.integers(3, 20))
    def open(self, host):
        self.disk, self.host, self.resident = MemoryDisk(), host, {}
        self.start()

    def start(self):
        self.world = World(host_blocks=self.host, device_blocks=0, disk=self.disk, config=StoreConfig())
        self.tenants = [Tenant(self.world, spec) for spec in SPECS]

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()

    who = st.integers(0, 1)
    key = st.integers(0, len(KEYS) - 1)

    @rule(who=who, key=key, durable=st.booleans())
    def put(self, who, key, durable):
        parent = ROOT_PARENT if key % 4 == 0 else KEYS[key - 1]
        wanted = Durability.DURABLE if durable else Durability.MEMORY
        outcome, existed = self.tenants[who].put(KEYS[key], parent, wanted)
        missing = parent != ROOT_PARENT and (who, parent) not in self.resident
        if (who, KEYS[key]) in self.resident and not (durable and missing):
            assert (outcome, existed) == (HIT, True)
        elif missing:
            assert outcome is MISS
        else:
            assert (outcome, existed) == (HIT, False)
            self.resident[who, KEYS[key]] = parent

    @rule(who=who, key=key, where=st.sampled_from([Target.HOST, Target.BUFFER, Target.IN_PLACE]))
    def get(self, who, key, where):
        assert (self.tenants[who].get(KEYS[key], where) is HIT) == ((who, KEYS[key]) in self.resident)

    @rule(who=who, key=key)
    def remove(self, who, key):
        tenant = self.tenants[who]
        (outcome,) = tenant.cache.remove(tenant.namespace_id, [KEYS[key]])
        assert (outcome is HIT) == (self.resident.pop((who, KEYS[key]), None) is not None)

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks):
        self.world.run()
        self.world.store.evict(Tier.HOST, nbytes=blocks * 4096)

    @rule()
    def restart(self):
        self.world.close()
        self.start()

    @invariant()
    def every_block_is_its_own_tenants(self):
        if hasattr(self, "world"):
            for who, tenant in enumerate(self.tenants):
                assert {key for key in KEYS if tenant.has(key)} == {key for w, key in self.resident if w == who}
            assert violations(self.world.store) == []


def test_two_namespaces_of_equal_keys_in_every_way():
    TenantsMachine.TestCase.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_machine(TenantsMachine, settings=TenantsMachine.TestCase.settings)
