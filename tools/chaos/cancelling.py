"""Calls of asyncio, cancelled at random points: the memory is the caller's again, and every right comes back."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from kvstore.client import AsyncClient, aligned_buffer
from kvstore.client.options import Control
from kvstore.core.types import Outcome
from kvstore.tools.chaos.base import figures
from kvstore.tools.chaos.ground import Ground, Tenant, chain

CALLS: Final = 240
"""Calls at once: the daemon takes so many of one kind."""


async def cut(call: Any, seconds: float) -> bool:
    """Await a call for so long; whether it was cancelled."""
    try:
        await asyncio.wait_for(call, seconds)
    except TimeoutError:
        return True
    return False


def cancelled_gets(ground: Ground) -> None:
    """After a get was cancelled, a later HIT is read into the same memory and looked at again a moment later."""
    tenant, keys = Tenant.of(7, 1), chain("cancelled", 3000)
    with ground.client([tenant], buffer_bytes=24 << 20) as writer:
        for begin in range(0, len(keys), 100):
            writer.put(tenant.id, tenant.blocks(keys[begin : begin + 100]))
    asyncio.run(_gets(ground, tenant, keys))


async def _gets(ground: Ground, tenant: Tenant, keys: list[Any]) -> None:
    pool = memoryview(aligned_buffer(tenant.nbytes * len(keys)))
    piece = pool[-8 * tenant.nbytes :]
    async with AsyncClient(ground.daemon.socket, ground.options(copy_threads=1)) as client:
        await client.open_namespace(tenant.spec)
        begin = time.perf_counter()
        await client.get(tenant.id, keys, out=pool)
        usual = time.perf_counter() - begin
        for _ in range(40):
            if not await cut(client.get(tenant.id, keys, out=pool), usual * ground.rng.uniform(0.05, 1.0)):
                continue
            got = await client.get(tenant.id, keys[:8], out=piece)
            ground.check("wrong bytes: in a get", tenant, keys[:8], got, "after a cancelled get")
            await asyncio.sleep(2 * usual + 0.02)
            words = "a HIT, overwritten later by a cancelled get"
            ground.check("wrong bytes: memory written after its call was cancelled", tenant, keys[:8], got, words)


def cancelled_puts(ground: Ground) -> None:
    """Cancelled puts, with the client alive: their places come back, and the next put has room."""
    asyncio.run(_puts(ground))


async def _puts(ground: Ground) -> None:
    tenant = Tenant.of(8, 2)
    async with AsyncClient(ground.daemon.socket, ground.options(buffer_bytes=4 << 20)) as client:
        await client.open_namespace(tenant.spec)
        for i in range(30):
            blocks = tenant.blocks(chain(f"put {ground.rng.random()}", 12))
            await cut(client.put(tenant.id, blocks), 0.0005 * (i % 8) + 0.0001)
        await asyncio.sleep(1.5)
        kept = (await asyncio.to_thread(figures, ground))["reservations"]
        if kept > (4 << 20) // 2 // tenant.nbytes:  # Half of the buffer may stand reserved for the next put.
            ground.findings.add("leak: places of cancelled puts", f"{kept} reservations while their client lives")
        put = await client.put(tenant.id, tenant.blocks(chain(f"last {ground.rng.random()}", 8)))
        missed = sum(outcome is not Outcome.HIT for outcome in put.outcomes)
        if missed:
            reasons = ", ".join(sorted({reason.name for reason in put.reasons}))
            ground.findings.add("leak: no room for a put after cancelled ones", f"{missed} of 8 blocks: {reasons}")


def cancelled_connects(ground: Ground) -> None:
    """Connects that are cancelled while they open many namespaces again."""
    asyncio.run(_connects(ground))


async def _connects(ground: Ground) -> None:
    client = AsyncClient(ground.daemon.socket, ground.options(buffer_bytes=1 << 20))
    await client.connect()
    for number in range(40):
        await client.open_namespace(Tenant.of(100 + number).spec)
    for _ in range(2):
        await asyncio.to_thread(ground.daemon.kill)
        await asyncio.to_thread(ground.daemon.start)
        for _ in range(12):
            await cut(client.connect(), 0.002 + ground.rng.random() * 0.02)
    await client.close()


def cancelled_calls(ground: Ground) -> None:
    """Many gRPC calls at once, cancelled while they wait for a worker; later as many are answered as before."""
    asyncio.run(_calls(ground))


async def _calls(ground: Ground) -> None:
    tenant = Tenant.of(9)
    client = AsyncClient(ground.daemon.socket, ground.options(control=Control.GRPC, buffer_bytes=1 << 20))
    async with client:
        for number in range(300):
            await client.open_namespace(Tenant.of(1000 + number).spec)
        await client.open_namespace(tenant.spec)
        for _ in range(8):
            calls = [asyncio.ensure_future(client.open_namespace(tenant.spec)) for _ in range(CALLS)]
            await asyncio.sleep(ground.rng.uniform(0.01, 0.08))
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(1.0)
        before = sum(client.failures().values())
        calls = [asyncio.ensure_future(client.open_namespace(tenant.spec)) for _ in range(CALLS)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        raised = sum(isinstance(answer, BaseException) for answer in answers)
        refused = raised + sum(client.failures().values()) - before
        if refused:
            words = f"{refused} of {CALLS} calls at once are refused: {client.failures()}"
            ground.findings.add("leak: worker slots of cancelled calls", words)
