"""Tenants over a real daemon: a block of one harms no flush, no drain and no restart of another."""

from __future__ import annotations

from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Durability, Outcome, Tier, WritePolicy
from kvstore.tools.chaos.ground import Tenant, chain

BACK = NamespacePolicy(write=WritePolicy.BACK)


def test_an_equal_key_of_another_tenant_fails_no_flush_and_no_drain(daemon, connect):
    daemon.start()
    one, other = Tenant.of(1), Tenant.of(2)
    first, second = connect(one, BACK), connect(other, BACK)
    equal, good = chain("equal", 1), chain("good", 40)
    assert second.put(other.id, other.blocks(equal, Durability.DURABLE)).outcomes == (Outcome.HIT,)
    daemon.evict(Tier.HOST, other.id, equal)
    assert first.put(one.id, one.blocks(equal, Durability.MEMORY)).outcomes == (Outcome.HIT,)
    daemon.evict(Tier.SSD, other.id, equal)
    first.put(one.id, one.blocks(good, Durability.MEMORY))
    first.flush(10_000)
    second.flush(10_000)
    daemon.stop()
    assert "drained: 0 blocks written, 0 not" in daemon.log.read_text()
    daemon.start()
    again = connect(one)
    for keys in (equal, good):
        got = again.get(one.id, keys)
        assert got.outcomes == (Outcome.HIT,) * len(keys)
        assert not one.wrong(keys, got.outcomes, got.payloads)


def test_durable_for_each_tenant_of_a_key(daemon, connect):
    daemon.start()
    tenants = [Tenant.of(1, 0), Tenant.of(2, 2), Tenant.of(3, 0)]
    clients = [connect(tenant) for tenant in tenants]
    keys = chain("equal", 3)
    for tenant, client in zip(tenants, clients, strict=True):
        assert client.put(tenant.id, tenant.blocks(keys, Durability.DURABLE)).outcomes == (Outcome.HIT,) * 3
    daemon.kill()
    daemon.start()
    for tenant in tenants:
        got = connect(tenant).get(tenant.id, keys)
        assert got.outcomes == (Outcome.HIT,) * 3
        assert not tenant.wrong(keys, got.outcomes, got.payloads)
