"""A block is (namespace, key): tenants that name the same keys never see, block or capture each other."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kvstore.cache import CommitEntry
from kvstore.core.errors import InvalidArgument, NamespaceMismatch, ResourceExhausted
from kvstore.core.types import ROOT_PARENT, BlockKey, Durability, Outcome, Reason, Target, Tier
from kvstore.store.config import StoreConfig
from kvstore.store.embedded import build_store
from kvstore.store.tables.namespaces import NamespaceTable
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


def test_a_namespace_that_nothing_needs_is_forgotten_to_make_room(make_world):
    world = make_world(config=StoreConfig(namespaces_max=4, peer_share=1.0))
    ids = []
    for number in range(200):
        cache = world.store.open_session(f"tenant {number}", buffer_bytes=1 << 16)
        ids.append(cache.open_namespace(replace(SPEC, salt=b"%d" % number)).namespace_id)
        cache.close()
    known = {report.namespace_id for report in world.store.namespaces()}
    assert known == {world.namespace_id, *ids[-3:]}
    assert len(world.store._state.namespaces.entries) == 4
    assert violations(world.store) == []


def test_a_namespace_with_a_block_or_an_open_session_stays(make_world):
    world = make_world(config=StoreConfig(namespaces_max=3, peer_share=1.0), device_blocks=0)
    holder, keeper = (Tenant(world, replace(SPEC, salt=salt)) for salt in (b"block", b"session"))
    cache = world.store.open_session("short", buffer_bytes=1 << 16)
    holder.put(KEYS[0])
    with pytest.raises(ResourceExhausted, match="namespaces_max"):
        cache.open_namespace(replace(SPEC, salt=b"one more"))
    world.cache.close()
    cache.open_namespace(replace(SPEC, salt=b"one more"))
    known = {report.namespace_id for report in world.store.namespaces()}
    assert holder.namespace_id in known
    assert keeper.namespace_id not in known or world.namespace_id not in known
    with world.store._state.locked() as book:
        book.drop_everywhere(book.find((holder.namespace_id, KEYS[0])), Reason.REMOVED)
    for number in range(3):
        other = world.store.open_session("others", buffer_bytes=1 << 16)
        other.open_namespace(replace(SPEC, salt=b"later %d" % number))
        other.close()
    assert holder.namespace_id not in {report.namespace_id for report in world.store.namespaces()}
    cache.close()


def test_long_specs_and_many_names_weigh_more(make_world):
    world = make_world(config=StoreConfig(namespaces_max=8, peer_share=1.0))
    with pytest.raises(ResourceExhausted):
        world.cache.open_namespace(replace(SPEC, salt=b"x" * 8192))
    for number in range(7):
        world.cache.open_namespace(SPEC, name=f"name {number}")
    with pytest.raises(ResourceExhausted):
        world.cache.open_namespace(SPEC, name="one name more")


def test_after_a_restart_only_namespaces_with_blocks_take_room(make_world, disk):
    world = make_world(disk=disk)
    tenants = [Tenant(world, replace(SPEC, salt=b"%d" % number)) for number in range(20)]
    for tenant in tenants[:3]:
        tenant.put(KEYS[0], durability=Durability.DURABLE)
    world.close()
    assert len(disk.namespaces()) == 3
    again = make_world(disk=disk, config=StoreConfig(namespaces_max=4, peer_share=1.0))
    assert len(again.store.namespaces()) == 4
    with pytest.raises(ResourceExhausted):
        again.cache.open_namespace(replace(SPEC, salt=b"one more"))
    assert all(Tenant(again, tenant.spec).has(KEYS[0]) for tenant in tenants[:3])
    config = StoreConfig(namespaces_max=2, loader_threads=0, writer_threads=0)
    fewer = build_store(config, host_bytes=1 << 20, disk=disk.crashed())
    assert [report.blocks for report in fewer.namespaces()] == [1, 1]
    fewer.close()


def test_near_is_bounded_and_of_one_tenant(make_world):
    table = NamespaceTable(5000)
    mine = [table.open(replace(SPEC, salt=b"me", extra=f'"{n}"'), "", None)[0] for n in range(100)]
    for number in range(2000):
        table.open(replace(SPEC, salt=b"%d" % number), "", None)
    near = table.near(replace(SPEC, salt=b"me", revision="new"), {})
    assert 1 <= len(near) <= 4
    assert {other.namespace_id for other in near} <= {entry.namespace_id for entry in mine}
    assert table.near(replace(SPEC, salt=b"stranger"), {}) == ()


def test_a_taken_name_tells_nothing_of_another_tenant(world):
    taken = world.cache.open_namespace(replace(SPEC, salt=b"secret of a", revision="1"), name="model")
    with pytest.raises(NamespaceMismatch) as caught:
        world.cache.open_namespace(replace(SPEC, salt=b"b", revision="2"), name="model")
    assert caught.value.field == "salt"
    assert "secret" not in str(caught.value)
    assert taken.namespace_id.hex() not in str(caught.value)


def on_disk(disk, blocks):
    """A disk on which (key, parent) lie as they are given, as whole blocks of ``SPEC``."""
    world = World(disk=disk)
    world.put([key for key, _ in blocks], durability=Durability.DURABLE)
    world.close()
    for stored in disk._blocks.values():
        stored.parent = dict(blocks)[stored.key]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("circle", [[0], [0, 1], [0, 1, 2, 3, 4]])
def test_recovery_believes_no_circle_of_parents(make_world, disk, circle):
    blocks = [(KEYS[one], KEYS[circle[at - 1]]) for at, one in enumerate(circle)]
    blocks += [(KEYS[5], ROOT_PARENT), (KEYS[6], KEYS[5]), (KEYS[7], KEYS[0])]
    on_disk(disk, blocks)
    world = make_world(disk=disk)
    tenant = Tenant(world, SPEC)
    assert [tenant.has(key) for key in KEYS] == [False] * 5 + [True, True, True]
    assert world.store.status().counters["recovered_in_circle"] == len(circle)
    assert violations(world.store) == []
    assert tenant.put(KEYS[0], durability=Durability.DURABLE) == (HIT, False)
    world.cache.flush()


@pytest.mark.timeout(20)
def test_a_commit_can_not_close_a_circle_after_a_restart(make_world, disk):
    world = make_world(disk=disk)
    tenant = Tenant(world, SPEC)
    tenant.put(KEYS[1], durability=Durability.DURABLE)
    tenant.put(KEYS[0], KEYS[1], Durability.DURABLE)
    tenant.cache.remove(tenant.namespace_id, [KEYS[1]])
    world.cache.flush()
    world.close()
    world = make_world(disk=disk)
    tenant = Tenant(world, SPEC)
    assert tenant.put(KEYS[1], KEYS[0])[0] is MISS
    assert tenant.put(KEYS[2], KEYS[0], Durability.DURABLE)[0] is HIT
    world.cache.flush()
    assert violations(world.store) == []
