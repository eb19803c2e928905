"""Mixed clients in a process of their own: both kinds, every transport, several tenants with equal keys.

A run stops, continues and kills such processes while other trouble is made.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from kvstore.client import AsyncClient, Client, ClientOptions
from kvstore.client.options import Control
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome, Tier
from kvstore.tools.chaos.ground import Ground, Tenant, chain

TENANTS: Final = tuple(Tenant.of(20 + i, size) for i, size in enumerate((0, 1, 2, 3)))
CHAINS: Final = 12


class Tally:
    """HITs checked, and the wrong ones in words."""

    def __init__(self) -> None:
        self.hits = 0
        self.wrong: list[str] = []

    def check(self, tenant: Tenant, keys: Sequence[Any], got: Any, words: str) -> None:
        """Compare every HIT of a get."""
        self.hits += sum(outcome is Outcome.HIT for outcome in got.outcomes)
        if tenant.wrong(keys, got.outcomes, got.payloads):
            self.wrong.append(words)


def pick(rng: random.Random) -> tuple[Tenant, list[Any]]:
    """A tenant and a chain: most are short, some long."""
    tenant = rng.choice(TENANTS)
    length = rng.choice((1, 3, 8, 60)) if tenant.nbytes < 1 << 20 else rng.choice((1, 3))
    return tenant, chain(f"traffic {rng.randrange(CHAINS)}", length)


def steady(target: str, options: ClientOptions, rng: random.Random, end: float, tally: Tally) -> None:
    """One synchronous client until ``end``."""
    with Client(target, options) as client:
        for tenant in TENANTS:
            client.open_namespace(tenant.spec)
        while time.monotonic() < end:
            tenant, keys = pick(rng)
            choice = rng.random()
            try:
                if choice < 0.35:
                    client.put(tenant.id, tenant.blocks(keys))
                elif choice < 0.9 or client.remote:
                    got = client.get(tenant.id, keys, wait_ms=rng.choice((0, 1, 500)))
                    tally.check(tenant, keys, got, f"get of a client ({options.control.value})")
                elif choice < 0.95:
                    client.prefetch(tenant.id, keys, Tier.HOST)
                else:
                    client.match(tenant.id, keys)
            except KVStoreError:
                time.sleep(0.05)


async def hasty(target: str, options: ClientOptions, rng: random.Random, end: float, tally: Tally) -> None:
    """One asyncio client until ``end``, whose calls are cancelled now and then."""
    async with AsyncClient(target, options) as client:
        for tenant in TENANTS:
            await client.open_namespace(tenant.spec)
        while time.monotonic() < end:
            tenant, keys = pick(rng)
            limit = rng.choice((0.001, 0.005, 2.0, 2.0))
            try:
                if rng.random() < 0.4:
                    await asyncio.wait_for(client.put(tenant.id, tenant.blocks(keys)), limit)
                else:
                    got = await asyncio.wait_for(client.get(tenant.id, keys, wait_ms=rng.choice((0, 500))), limit)
                    tally.check(tenant, keys, got, f"get of an asyncio client ({options.control.value})")
            except (TimeoutError, KVStoreError):
                await asyncio.sleep(0.01)


def start(ground: Ground, seconds: float) -> subprocess.Popen[str]:
    """A process of traffic; its seed, transport and kind come from the round's."""
    arguments = [str(ground.rng.randrange(1 << 30)), f"{seconds:g}", str(ground.daemon.socket)]
    arguments.append(f"grpc://127.0.0.1:{ground.daemon.tcp_port}")
    command = [sys.executable, "-m", "kvstore.tools.chaos.traffic", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def end(ground: Ground, process: subprocess.Popen[str]) -> None:
    """Wait for a process of traffic and take what it saw; one that was killed saw nothing."""
    try:
        told = process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        ground.findings.add("silence: a client that does not end", "traffic ran a minute longer than asked")
        return
    for line in told.splitlines():
        seen = json.loads(line)
        ground.findings.hits += seen["hits"]
        if seen["wrong"]:
            ground.findings.add("wrong bytes: in traffic", seen["wrong"][0], len(seen["wrong"]))


def main(arguments: Sequence[str]) -> None:
    """The process of traffic: one client of a kind and a transport that its seed chooses."""
    rng, until, tally = random.Random(int(arguments[0])), time.monotonic() + float(arguments[1]), Tally()
    target = rng.choice((arguments[2], arguments[2], arguments[3]))
    control = Control.SOCKET if target != arguments[2] else rng.choice(list(Control))
    options = ClientOptions(
        buffer_bytes=rng.choice((1 << 20, 4 << 20)), control=control, timeout_s=3.0, lease_ttl_ms=1000,
        remote_ttl_ms=3000, copy_threads=rng.choice((1, 2)),
    )  # fmt: skip
    try:
        if rng.random() < 0.5:
            steady(target, options, rng, until, tally)
        else:
            asyncio.run(hasty(target, options, rng, until, tally))
    finally:
        print(json.dumps({"hits": tally.hits, "wrong": tally.wrong}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
