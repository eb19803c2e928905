"""fork(): parent and child both go on with the client, and each gets its own blocks or misses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome
from kvstore.tools.chaos.ground import Ground, Tenant, chain

FOREIGN: Final = (KVStoreError, DecodeError, LookupError, OSError, RuntimeError, ValueError)
"""What a client that is not strict has no business to raise."""


def forked(ground: Ground) -> None:
    """Run the process that forks: it must not be this one, whose threads do not survive that."""
    command = [sys.executable, "-m", "kvstore.tools.chaos.forks", str(ground.daemon.socket)]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        ground.findings.add("silence: a client after fork()", "parent or child hung for a minute")
        return
    if ran.returncode:
        ground.findings.add("failure: a client after fork()", f"its process ended with {ran.returncode}")
        return
    told = [int(word) for word in ran.stdout.split()]
    if told[3]:
        ground.findings.add("failure: a client after fork()", f"{told[3]} calls raised what is no error of the cache")
    ground.findings.hits += told[0]
    if told[1]:
        ground.findings.add("wrong bytes: after fork()", f"{told[1]} HITs with the other process's bytes", told[1])
    if told[2]:
        ground.findings.add("rights: a child ends its parent's", "close() in a child ended a lease of its parent")


def fork_and_read(socket: Path) -> tuple[int, int, int, int]:
    """HITs checked, wrong ones, whether a child's ``close`` ended its parent's lease, calls that raised."""
    tenant = Tenant.of(5)
    client = Client(socket, ClientOptions(timeout_s=0.5, buffer_bytes=1 << 20))
    client.open_namespace(tenant.spec)
    chains = [chain(f"fork {i}", 4) for i in range(2)]
    for keys in chains:
        client.put(tenant.id, tenant.blocks(keys))
    hits = wrong = raised = 0
    for _ in range(6):
        pid = os.fork()
        mine = chains[pid == 0]
        end, bad = time.monotonic() + 0.7, 0
        while time.monotonic() < end:
            try:
                got = client.get(tenant.id, mine, wait_ms=50)
            except FOREIGN as error:
                raised += 1
                print(f"after fork(): {error!r}", file=sys.stderr)
                break
            hits += sum(outcome is Outcome.HIT for outcome in got.outcomes)
            bad += len(tenant.wrong(mine, got.outcomes, got.payloads))
        if pid == 0:
            os._exit(min(bad, 200))
        wrong += bad + max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if wrong:
            break
    return hits, wrong, lease_lost(socket), raised


def lease_lost(socket: Path) -> int:
    """1 if a child that closes the client ends a lease of the parent."""
    client = Client(socket, ClientOptions(buffer_bytes=1 << 20))
    lease = client.grant_lease("parent", 20_000)
    before = client.failures()
    pid = os.fork()
    if pid == 0:
        client.close()
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.2)
    client.renew_lease(lease)
    lost = client.failures() != before
    client.close()
    return int(lost)


def main(arguments: Sequence[str]) -> None:
    """The process that forks."""
    print(*fork_and_read(Path(arguments[0])), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
