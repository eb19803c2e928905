"""Small promises to clients, over a real daemon."""

from __future__ import annotations

import gc

import pytest

from kvstore.client.options import Control
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import chain_keys
from kvstore.core.types import Outcome
from kvstore.tools.chaos.base import figures
from kvstore.tools.chaos.ground import Findings, Ground, Tenant, chain


@pytest.mark.parametrize("control", list(Control))
def test_gets_leave_nothing_pinned_while_their_client_lives(daemon, connect, flags, tmp_path, control):
    daemon.start()
    tenant = Tenant.of(1)
    client = connect(tenant, control=control)
    chains = [chain(f"pinned {i}", 4) for i in range(30)]
    for keys in chains:
        client.put(tenant.id, tenant.blocks(keys))
    for keys in chains:
        client.get(tenant.id, keys)
        gc.collect()
    # The last call is answered behind the releases that were posted before it.
    client.match(tenant.id, chains[0])
    ground = Ground(tmp_path, None, Findings(), daemon, flags)
    pinned = {name: n for name, n in figures(ground).items() if name.startswith("pinned")}
    for _ in range(200):
        if not any(pinned.values()):
            break
        client.match(tenant.id, chains[0])
        pinned = {name: n for name, n in figures(ground).items() if name.startswith("pinned")}
    assert not any(pinned.values()), pinned


def test_token_ids_that_are_no_integers_make_no_keys():
    with pytest.raises((InvalidArgument, TypeError)):
        chain_keys(Tenant.of(1).id, [1.5] * 4, 4)


def test_a_short_bound_on_leases_is_no_error_of_every_get(daemon, flags, connect):
    flags["lease-ttl-max-s"] = "30"
    daemon.start()
    tenant = Tenant.of(1)
    client = connect(tenant)
    keys = chain("short", 2)
    client.put(tenant.id, tenant.blocks(keys))
    assert client.get(tenant.id, keys).outcomes == (Outcome.HIT,) * 2


def test_the_first_get_after_a_restart_hits(daemon, connect):
    daemon.start()
    tenant = Tenant.of(1)
    client = connect(tenant, strict=False)
    keys = chain("restart", 3)
    client.put(tenant.id, tenant.blocks(keys))
    client.flush(10_000)
    assert client.get(tenant.id, keys).outcomes == (Outcome.HIT,) * 3
    daemon.stop()
    daemon.start()
    assert client.get(tenant.id, keys).outcomes == (Outcome.HIT,) * 3
