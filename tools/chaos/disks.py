"""Long contexts on a small SSD tier, full and failing disks, killed daemons: durable stays, the newest get in."""

from __future__ import annotations

import os
import shutil
import signal
import time

from kvstore.core.errors import KVStoreError
from kvstore.core.types import Durability, Outcome, Target, Tier
from kvstore.tools.chaos.ground import Ground, Tenant, chain


def long_contexts(ground: Ground) -> None:
    """Few long chains, together larger than the SSD tier: the newest is there after each flush."""
    tenant = Tenant.of(11, 2)
    blocks = ground.rng.choice((120, 240, 400))
    with ground.client([tenant], buffer_bytes=8 << 20) as client:
        stuck = 0
        total = 2 * (96 << 20) // (blocks * tenant.nbytes) + 1
        for i in range(total):
            keys = chain(f"long {ground.rng.random()}", blocks)
            for begin in range(0, blocks, 40):
                part = tenant.blocks(keys)
                few = slice(begin, begin + 40)
                client.put(tenant.id, type(part)(part.keys[few], part.parents[few], part.payloads[few]))
            try:
                client.flush(8000)
            except KVStoreError as error:
                ground.findings.add("jam: a flush that fails on long contexts", str(error))
            found = client.match(tenant.id, keys)
            there = sum(bool(residency & Tier.SSD.bit) for residency in found.residency)
            if there < min(blocks, 40) and i:
                stuck += 1
        if stuck > 1:
            words = f"{stuck} of {total} chains of {blocks} blocks of 128 KiB did not get to an SSD tier of 96 MiB"
            ground.findings.add("jam: new contexts do not get to SSD", words)


def late_gets(ground: Ground) -> None:
    """Gets that do not wait, or time out, for blocks on SSD: their pins end although the client lives on."""
    tenant = Tenant.of(12, 2)
    keys = [chain(f"late {i}", 1)[0] for i in range(200)]
    with ground.client([tenant], lease_ttl_ms=2000, buffer_bytes=4 << 20) as client:
        for begin in range(0, len(keys), 10):
            for key in keys[begin : begin + 10]:
                client.put(tenant.id, tenant.blocks([key]))
        client.flush(10_000)
        ground.daemon.evict(Tier.HOST, tenant.id, keys)
        for begin in range(0, 150, 5):
            got = client.get(tenant.id, keys[begin : begin + 5], wait_ms=ground.rng.choice((0, 0, 1)))
            ground.check("wrong bytes: in a get", tenant, keys[begin : begin + 5], got, "a get that does not wait")
        for _ in range(30):
            client.get(tenant.id, keys[-1:], wait_ms=2000)
            pinned = sum(tier.pinned_bytes for tier in ground.daemon.status().tiers)
            if not pinned:
                return
            time.sleep(0.2)
        words = f"{pinned >> 10} KiB pinned six seconds after the last of them, their client lives"
        ground.findings.add("leak: pins of gets that did not wait", words)


def large_put(ground: Ground) -> None:
    """A put larger than the client's buffer: all of it is stored, where HOST has room."""
    tenant = Tenant.of(13, 2)
    keys = chain(f"wide {ground.rng.random()}", 64)
    with ground.client([tenant], buffer_bytes=2 << 20) as client:
        put = client.put(tenant.id, tenant.blocks(keys))
        missed = sum(outcome is not Outcome.HIT for outcome in put.outcomes)
        got = client.get(tenant.id, keys)
        ground.check("wrong bytes: in a get", tenant, keys, got, "a put larger than the buffer")
        if missed:
            words = f"{missed} of 64 blocks of 128 KiB, through a buffer of 2 MiB into a HOST of 24 MiB"
            ground.findings.add("lost: a put larger than the buffer", words)


def full_disk(ground: Ground) -> None:
    """Others fill the disk: the daemon starts all the same, and good blocks are not dropped in vain."""
    tenant = Tenant.of(14, 2)
    old = [chain(f"old {i}", 10) for i in range(40)]
    with ground.client([tenant], buffer_bytes=8 << 20) as client:
        for keys in old:
            client.put(tenant.id, tenant.blocks(keys))
        client.flush(20_000)
    ground.daemon.stop()
    ground.flags["ssd-free-floor"] = str(shutil.disk_usage(ground.folder).free + (1 << 34))
    try:
        ground.daemon.start()
    except KVStoreError as error:
        ground.findings.add("silence: no start on a full disk", str(error).splitlines()[-1])
        ground.flags["ssd-free-floor"] = "0"
        ground.daemon.start()
        return
    with ground.client([tenant], buffer_bytes=8 << 20) as client:
        before = sum(client.match(tenant.id, keys).matched for keys in old)
        for i in range(20):
            client.put(tenant.id, tenant.blocks(chain(f"new {i}", 10)))
            try:
                client.flush(500)
            except KVStoreError:
                continue
        after = sum(client.match(tenant.id, keys).matched for keys in old)
        got = client.get(tenant.id, old[0])
        ground.check("wrong bytes: in a get", tenant, old[0], got, "on a full disk")
    if after < before * 0.8:
        ground.findings.add("emptied: good blocks dropped on a full disk", f"{before} blocks before, {after} after")
    ground.daemon.stop()
    ground.flags["ssd-free-floor"] = "0"
    ground.daemon.start()


def killed_daemon(ground: Ground) -> None:
    """Durable blocks, then kill -9 (on a disk that fails now and then): what was acknowledged is there again."""
    tenant = Tenant.of(15, ground.rng.choice((0, 1, 2)))
    broken = ground.folder / "broken"
    acknowledged = []
    failing = ground.rng.random() < 0.5
    with ground.client([tenant]) as client:
        for i in range(30):
            if failing and i == 10:
                broken.touch()
            keys = chain(f"killed {ground.rng.random()}", 4)
            put = client.put(tenant.id, tenant.blocks(keys, Durability.DURABLE))
            if all(outcome is Outcome.HIT for outcome in put.outcomes):
                acknowledged.append(keys)
        ground.daemon.kill()
        broken.unlink(missing_ok=True)
        ground.daemon.start()
        if not client.wait_ready(10):
            ground.findings.add("silence: a client after a restart", "no connection within ten seconds")
            return
        lost = 0
        # Rights of the old session are found to be gone by the first call that needs one; that call may miss.
        client.get(tenant.id, acknowledged[0] if acknowledged else [])
        for keys in acknowledged:
            got = client.get(tenant.id, keys)
            ground.check("wrong bytes: in a get", tenant, keys, got, "after kill -9 of the daemon")
            lost += sum(outcome is not Outcome.HIT for outcome in got.outcomes)
    if lost:
        words = f"{lost} blocks acknowledged before kill -9{' under EIO' if failing else ''}"
        ground.findings.add("lost: durable blocks", words, lost)


def stopped_daemon(ground: Ground) -> None:
    """The daemon is stopped for longer than leases live, while a view is open and a job runs."""
    tenant = Tenant.of(16, 2)
    keys = chain("paused", 6)
    with ground.client([tenant], lease_ttl_ms=500, timeout_s=0.5) as client:
        client.put(tenant.id, tenant.blocks(keys))
        lease = client.grant_lease("paused", 500)
        client.fetch(tenant.id, keys, Target.IN_PLACE, lease_id=lease)
        os.kill(ground.daemon.pid, signal.SIGSTOP)
        try:
            client.get(tenant.id, keys, wait_ms=0)
            time.sleep(0.7)
        finally:
            os.kill(ground.daemon.pid, signal.SIGCONT)
        ground.fill(client, tenant, "after pause", 30 << 20)
        ground.check("wrong bytes: in a get", tenant, keys, client.get(tenant.id, keys), "after SIGSTOP of the daemon")
