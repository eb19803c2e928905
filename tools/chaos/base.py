"""Quiescence: when every client is gone, each count of rights is back where it was before the first came."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Final

from kvstore.core.errors import KVStoreError
from kvstore.tools.chaos.ground import Ground, Tenant
from kvstore.v1 import admin_pb2

SETTLE_SECONDS_MAX: Final = 12.0
"""The leases and sessions of chaos have at most some seconds to live; what is there after this time stays."""
THREADS_MORE_MAX: Final = 64
"""Beside those of a start: pools of the daemon (16 for work, 32 for waits, 4 for operators, the loop's own) grow with
use up to their bounds and keep their threads."""


def warm_up(ground: Ground) -> dict[str, int]:
    """Use each transport once, so that what the daemon keeps for good is there; then the base."""
    tenant = Tenant.of(0)
    for _ in range(2):
        with ground.client([tenant]) as client:
            client.put(tenant.id, tenant.blocks([]))
    time.sleep(0.3)
    base = figures(ground)
    base["threads"] += THREADS_MORE_MAX
    return base


def figures(ground: Ground) -> dict[str, int]:
    """Counts of rights now, by name. The session that asks is counted too, each time."""
    port = ground.daemon.connect()
    try:
        status = port.call("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse, 10.0)
        listed = port.call("Admin/ListLeases", admin_pb2.ListLeasesRequest(), admin_pb2.ListLeasesResponse, 10.0)
        # While this session is open: the daemon may see its end a moment later, or before the next line.
        opened = Counter(link.partition(":")[0] for link in descriptors(ground.daemon.pid))
    finally:
        port.close()
    found = {
        "leases": len(listed.leases),
        "reservations": status.reservations,
        "jobs": status.jobs,
        "sessions": status.sessions,
        "bytes of buffers": sum(session.buffer_bytes for session in listed.sessions),
        "sockets": opened["socket"],
        "shared memories": opened["/memfd"],
        "threads": len(os.listdir(f"/proc/{ground.daemon.pid}/task")),
    }
    for tier in status.tiers:
        found[f"pinned bytes of tier {tier.tier}"] = tier.pinned_bytes
        found[f"reserved bytes of tier {tier.tier}"] = tier.reserved_bytes
    # Names of counters differ from build to build; those of deadlines say how many entries their heap has.
    found |= {name: int(n) for name, n in status.counters.items() if "deadline" in name and "entries" in name}
    return found


def owners(ground: Ground) -> str:
    """Who owns the sessions and leases that are there, in one line."""
    port = ground.daemon.connect()
    try:
        listed = port.call("Admin/ListLeases", admin_pb2.ListLeasesRequest(), admin_pb2.ListLeasesResponse, 10.0)
    finally:
        port.close()
    sessions = [f"session {s.owner} {'remote ' if s.remote else ''}{s.buffer_bytes >> 10} KiB" for s in listed.sessions]
    leases = [f"lease {x.name[:20]!r} of {x.owner}, {x.seconds_left:.0f} s left, {x.pins} pins" for x in listed.leases]
    return "; ".join([*sessions, *leases][:40])


def descriptors(pid: int) -> list[str]:
    """What a process holds open, sockets and anonymous memory. Files of the SSD tier come and go by themselves."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if link.startswith(("socket:", "/memfd:")):
            found.append(link)
    return sorted(found)


def settle(ground: Ground, base: dict[str, int], after: str) -> None:
    """Wait until no count is above its base; each that stays is a leak."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    above: dict[str, tuple[int, int]] = {}
    while True:
        try:
            now = figures(ground)
        except KVStoreError as error:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            ground.findings.add("silence: a daemon that answers no admin", f"after {after}: {error}")
            return
        above = {name: (n, base.get(name, 0)) for name, n in now.items() if n > base.get(name, 0)}
        if not above or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if above:
        print(f"what is still there after {after}: {owners(ground)}", flush=True)
        print(f"open: {', '.join(descriptors(ground.daemon.pid))}\n{ground.daemon.log_tail(5)}", flush=True)
    for name, (n, was) in above.items():
        ground.findings.add(f"leak: {name}", f"after {after}: {n}, {was} before")
