"""One process of the crowd in ``test_crowd.py``: clients in threads, each doing at random whatever a client can do.

``python -m tests.client.crowd SOCKET CLIENTS SECONDS`` prints a line of JSON: calls by name, refusals and other errors
by their first words, wrong bytes, and milliseconds of matches. Every block that is read is compared with its key.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.errors import KVStoreError, ResourceExhausted, UnknownLease
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.types import Codec, Durability, Target, Tier
from tests.client.harness import TOKENS, payload, small_spec

TENANTS, CHAINS, LENGTH = 4, 300, 8


class One:
    """One client."""

    def __init__(self, socket: str, number: int) -> None:
        self.chance = random.Random(os.getpid() * 1000 + number)
        options = ClientOptions(
            name=f"crowd {number}",
            strict=True,
            device=False,
            buffer_bytes=1 << 20,
            timeout_s=30.0,
            connect_timeout_s=30.0,
        )
        self.client = Client(socket, options)
        opened = self.client.open_namespace(small_spec(salt=b"tenant %d" % (number % TENANTS)))
        self.namespace, self.layout = opened.namespace_id, opened.layout
        self.calls: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.matches: list[float] = []

    def run(self, seconds: float) -> None:
        """Until the time is over."""
        end = time.monotonic() + seconds
        calls: list[Callable[[list], None]] = [
            self.put, self.put, self.get, self.get, self.match, self.match, self.look, self.fetch, self.prefetch,
            self.remove, self.flush, self.stage, self.hold,
        ]  # fmt: skip
        while time.monotonic() < end:
            seed, blocks = self.chance.randrange(CHAINS), self.chance.randrange(1, LENGTH + 1)
            tokens = [(seed * 7919 + i) % 50_000 for i in range(blocks * TOKENS)]
            call = self.chance.choice(calls)
            try:
                call(chain_keys(self.namespace, tokens, TOKENS))
            except UnknownLease:
                self.calls["lease ended before it was used"] += 1
            except KVStoreError as error:
                kind = "refused" if isinstance(error, ResourceExhausted) else "failed"
                self.errors[f"{kind}: {call.__name__}: {type(error).__name__}: {str(error)[:120]}"] += 1
            else:
                self.calls[call.__name__] += 1
        self.client.close()

    def put(self, keys: list) -> None:
        durability = self.chance.choice([None, None, Durability.DURABLE])
        payloads = [payload(self.layout, key) for key in keys]
        self.client.put(self.namespace, PutBlocks(keys, parents_of(keys), payloads, durability=durability))

    def get(self, keys: list) -> None:
        for key, found in zip(keys, self.client.get(self.namespace, keys).payloads, strict=True):
            self.compare("get", key, found)

    def look(self, keys: list) -> None:
        with self.client.get_in_place(self.namespace, keys) as views:
            seen = [
                (key, b"".join(bytes(view.slice(layer)) for layer in range(self.layout.layers)))
                for key, view in zip(keys, views, strict=True)
                if view is not None and view.codec is Codec.RAW
            ]
            held = views.held()
        for key, found in seen if held else ():
            self.compare("look", key, found)

    def compare(self, name: str, key: bytes, found: object) -> None:
        if found is not None and bytes(found) != payload(self.layout, key):
            self.wrong.append(f"{name} {key.hex()}")

    def match(self, keys: list) -> None:
        began = time.perf_counter()
        self.client.match(self.namespace, keys)
        self.matches.append(1000 * (time.perf_counter() - began))

    def fetch(self, keys: list) -> None:
        lease = self.client.grant_lease("fetch", self.chance.choice([200, 1000, 5000]))
        self.client.fetch(self.namespace, keys, self.chance.choice([Target.IN_PLACE, Target.HOST]), lease_id=lease)
        if self.chance.random() < 0.5:
            self.client.release(lease)

    def hold(self, keys: list) -> None:
        self.client.hold(self.client.grant_lease("hold", self.chance.choice([200, 1000, 2000])), self.namespace, keys)

    def prefetch(self, keys: list) -> None:
        self.client.prefetch(self.namespace, keys, Tier.HOST)

    def remove(self, keys: list) -> None:
        self.client.remove(self.namespace, keys[-1:])

    def flush(self, _: list) -> None:
        self.client.flush(200)

    def stage(self, _: list) -> None:
        with self.client.stage(self.namespace, 2):
            return


def main() -> None:
    """See the module."""
    ones = [One(sys.argv[1], number) for number in range(int(sys.argv[2]))]
    print(json.dumps("ready"), flush=True)
    threads = [threading.Thread(target=one.run, args=(float(sys.argv[3]),)) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls, errors = (sum((getattr(one, name) for one in ones), collections.Counter()) for name in ("calls", "errors"))
    matches = [found for one in ones for found in one.matches]
    wrong = [found for one in ones for found in one.wrong]
    print(json.dumps({"calls": calls, "errors": errors, "wrong": wrong, "matches": matches}))


if __name__ == "__main__":
    main()
