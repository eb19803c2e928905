"""Tenants with equal keys: each gets its own bytes, durable is durable for each, and nobody reads another's."""

from __future__ import annotations

from kvstore.core.errors import KVStoreError
from kvstore.core.types import Durability, Outcome, Tier
from kvstore.tools.chaos.ground import Ground, Tenant, chain


def equal_keys(ground: Ground) -> None:
    """Two or three tenants put blocks under the same keys, in any order, and read them back from each tier."""
    sizes = ground.rng.sample((0, 1, 2), 2)
    tenants = [Tenant.of(i, size) for i, size in enumerate((*sizes, sizes[0]))]
    clients = [ground.client([tenant]) for tenant in tenants]
    keys = chain(f"equal {ground.rng.random()}", ground.rng.randrange(1, 6))
    durable: list[set[int]] = [set() for _ in tenants]
    for i in ground.rng.sample(range(len(tenants)), len(tenants)):
        put = clients[i].put(tenants[i].id, tenants[i].blocks(keys, Durability.DURABLE))
        durable[i] = {n for n, outcome in enumerate(put.outcomes) if outcome is Outcome.HIT}
        if ground.rng.random() < 0.5:
            try:
                ground.daemon.evict(Tier.HOST, tenants[i].id, keys)
            except KVStoreError as error:
                ground.findings.add("crossed: an eviction that fails", str(error))
    for i, tenant in enumerate(tenants):
        got = clients[i].get(tenant.id, keys)
        ground.check("wrong bytes: another tenant's", tenant, keys, got, f"tenant {i} of equal keys")
        missing = sum(got.outcomes[n] is not Outcome.HIT for n in durable[i])
        if missing:
            words = f"tenant {i}: {missing} of {len(keys)} blocks, told to be durable, are not there"
            ground.findings.add("crossed: a durable block that another tenant's equal key captured", words)
    for client in clients:
        client.close()
