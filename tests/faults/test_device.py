"""DEVICE: what a session may write is its own; a committed block is out of everybody's reach."""

from __future__ import annotations

import pytest

from kvstore.cache import CommitEntry
from kvstore.core.types import ROOT_PARENT, Area, Outcome, Tier
from kvstore.tools.chaos.ground import Tenant, chain


def test_a_committed_block_on_device_is_not_served_with_anothers_bytes(daemon, flags, connect):
    flags["ssd"] = "0"
    daemon.start()
    tenant = Tenant.of(1)
    keys = chain("device", 1)
    owner, stranger = connect(tenant), connect(tenant)
    reserved = owner.reserve(tenant.id, Tier.DEVICE, keys=keys)
    place = reserved.places[0]
    begin, end = place.offset, place.offset + tenant.nbytes
    owner.memory(place.area)[begin:end] = tenant.payload(keys[0])
    entry = CommitEntry(reserved.reservation_ids[0], keys[0], ROOT_PARENT)
    assert owner.commit(tenant.id, [entry]).outcomes == (Outcome.HIT,)
    for session in (owner, stranger):
        seen = session.memory(Area.DEVICE)
        assert seen.readonly
        with pytest.raises(TypeError, match="read-only"):
            seen[:8] = bytes(8)
    daemon.evict(Tier.DEVICE, tenant.id, keys)
    got = owner.get(tenant.id, keys)
    assert not tenant.wrong(keys, got.outcomes, got.payloads)
