"""A busy neighbour: a client process that puts and gets 1 MiB blocks until its standard input closes."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.client import Client, ClientOptions, PutBlocks, aligned_buffer
from kvstore.tools.kvbench.limits import noise
from kvstore.tools.kvbench.workload import BLOCK_BYTES, Chain, opaque_spec

BATCH = 4


def main() -> None:
    """Put batches of a fresh chain each and read every one back; argument: the session socket."""
    spec = opaque_spec("load")
    with Client(sys.argv[1], ClientOptions(name="kvbench load", strict=True, device=False, copy_threads=1)) as client:
        namespace = client.open_namespace(spec).namespace_id
        payloads = [noise(BLOCK_BYTES, seed) for seed in range(BATCH)]
        out = aligned_buffer(BATCH * BLOCK_BYTES)
        print("ready", flush=True)
        turn = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            chain = Chain.fresh(spec, BATCH, start=turn)
            client.put(namespace, PutBlocks(chain.keys, chain.parents, payloads))
            client.get(namespace, chain.keys, out=out)
            turn += 1


@contextmanager
def neighbour(socket: str) -> Iterator[None]:
    """A busy neighbour while the ``with`` lasts."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstore.tools.kvbench.load", socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        if child.stdout is None or child.stdout.readline().strip() != b"ready":
            raise RuntimeError(f"the load process ended with {child.wait()}")
        yield
    finally:
        if child.stdin is not None:
            child.stdin.close()
        child.wait(timeout=60)


if __name__ == "__main__":
    main()
