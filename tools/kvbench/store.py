"""``kvbench store``: what a same-host client gets, beside what memory and sockets of this machine can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.client import Client, ClientOptions, Control, PutBlocks, aligned_buffer
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import BlockKey, LeaseId, NamespaceId, Outcome, Target, WritePolicy
from kvstore.tools.kvbench import peers
from kvstore.tools.kvbench.calls import run_calls
from kvstore.tools.kvbench.inside import busy, fill_inside, lookups, matcher, putter, store_inside
from kvstore.tools.kvbench.limits import MemoryCopies, echo, noise
from kvstore.tools.kvbench.load import neighbour
from kvstore.tools.kvbench.rows import Row, median, percentile, rate, take_turns
from kvstore.tools.kvbench.workload import BLOCK_BYTES, Chain, opaque_spec

BATCH: Final = 16
RESIDENT_BLOCKS: Final = 192
"""More than the caches hold: reads find their blocks in memory, as in service."""
MATCH_KEYS: Final = 512
DESCRIPTORS: Final = 64
POLICY: Final = NamespacePolicy(write=WritePolicy.BACK)
"""Blocks of these benches reach the disk only if HOST is full, so the disk is no part of the figures."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int = 60
    calls: int = 2000


def run_store(socket: str, effort: Effort) -> list[Row]:
    """All rows of ``kvbench store`` against the daemon on ``socket``, whose HOST holds 512 MiB at least."""
    options = ClientOptions(name="kvbench", strict=True, device=False, buffer_bytes=64 << 20)
    with Client(socket, options) as client:
        return [
            *_copies(client, effort),
            *_calls(client, effort),
            *_matches(client, socket, effort),
            *_matches_inside(effort),
            *run_calls(),
        ]


def fill(client: Client, name: str, blocks: int, block_bytes: int, *also: Client) -> tuple[NamespaceId, Chain]:
    """Store a chain of noise, in a namespace that ``also`` others open. Raises Unavailable if not all of it is kept."""
    spec = opaque_spec(name, block_bytes=block_bytes)
    for other in also:
        other.open_namespace(spec)
    namespace = client.open_namespace(spec, policy=POLICY).namespace_id
    chain = Chain.fresh(spec, blocks)
    payloads = [noise(block_bytes, seed) for seed in range(16)]
    for begin in range(0, blocks, 16):
        part = slice(begin, begin + 16)
        done = client.put(
            namespace, PutBlocks(chain.keys[part], chain.parents[part], payloads[: len(chain.keys[part])])
        )
        if any(outcome is not Outcome.HIT for outcome in done.outcomes):
            raise Unavailable(f"HOST is too small for this bench: it needs {blocks * block_bytes >> 20} MiB")
    return namespace, chain


def batches(keys: Sequence[BlockKey], size: int) -> Callable[[], Sequence[BlockKey]]:
    """A function that returns the next ``size`` keys, around and around."""
    starts = itertools.cycle(range(0, len(keys) - size + 1, size))
    return lambda: keys[(begin := next(starts)) : begin + size]


def _copies(client: Client, effort: Effort) -> list[Row]:
    threads = client.options.copy_threads
    copies = MemoryCopies(BLOCK_BYTES, BATCH, threads)
    namespace, chain = fill(client, "get", RESIDENT_BLOCKS, BLOCK_BYTES)
    # Held: what is put meanwhile is more than HOST has room for beside them.
    lease = client.grant_lease("kvbench copies", 600_000)
    client.hold(lease, namespace, chain.keys)
    following = batches(chain.keys, BATCH)
    out = aligned_buffer(BATCH * BLOCK_BYTES)
    out_bytes = copies.batch_bytes

    def get() -> None:
        got = client.get(namespace, following(), out=out)
        _require(got.outcomes)

    def in_place() -> None:
        with client.get_in_place(namespace, following()) as blocks:
            if None in blocks:
                raise Unavailable("a block that was stored is not there: run kvbench on a daemon of its own")

    puts = _Puts(client)
    cases: dict[str, Callable[[], object]] = {
        "copy": copies,
        "get": get,
        "put": puts,
        "write": puts.stage,
        "put staged": puts.put_staged,
    }
    seconds = take_turns(cases, effort.rounds)
    copies.close()
    with echo(16 * BATCH) as call:
        # Beside its limit and not beside the copies, which leave nothing in the caches.
        beside = {"in place": in_place, "echo": lambda: call(bytes(34 * BATCH))}
        seconds |= take_turns(beside, effort.rounds * 4)
    client.release(lease)
    limit = rate(out_bytes, median(seconds["copy"]))
    conditions = {"blocks": BATCH, "block_bytes": BLOCK_BYTES, "copy_threads": threads, "rounds": effort.rounds}

    def copied(case: str, name: str, target: str, published: Mapping[str, float]) -> Row:
        return Row(
            bench="store",
            case=case,
            value=rate(out_bytes, median(seconds[name])),
            unit="MB/s",
            limit=limit,
            limit_unit="MB/s",
            limit_name=f"memcpy, {threads} threads",
            target=target,
            peers=published,
            conditions=conditions,
        )

    return [
        copied("get 16 x 1 MiB, copied out", "get", ">= 0.9 of it", peers.GET_16_MIB),
        Row(
            bench="store",
            case="get 16 x 1 MiB, in place",
            value=median(seconds["in place"]) * 1e3,
            unit="ms",
            limit=median(seconds["echo"]) * 1e3,
            limit_unit="ms",
            limit_name="echo of the same size, raw socket",
            target="<= 0.3 ms",
            conditions=conditions,
        ),
        copied("put 16 x 1 MiB, checksummed", "put", ">= 0.5 of it", peers.PUT_16_MIB),
        copied("put 16 x 1 MiB, from the session's buffer", "put staged", ">= 0.85 of it", {}),
    ]


class _Puts:
    """Puts of fresh blocks, a batch a call, from memory of the bench or of the session's buffer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._spec = opaque_spec("put")
        self._namespace = client.open_namespace(self._spec, policy=POLICY).namespace_id
        self._payloads = [aligned_buffer(BLOCK_BYTES) for _ in range(BATCH)]
        for seed, payload in enumerate(self._payloads):
            payload[:] = noise(BLOCK_BYTES, seed).data
        self._staged: Sequence[memoryview] = ()
        # Keys are made outside of what is measured, as an engine makes them while it tokenises.
        self._chains = iter([Chain.fresh(self._spec, BATCH, start) for start in range(1024)])

    def __call__(self) -> None:
        self._put(self._payloads)

    def stage(self) -> None:
        """Write a batch into the buffer, as an engine's copies from its device do."""
        self._staged = self._client.stage(self._namespace, BATCH)
        for memory, payload in zip(self._staged, self._payloads, strict=True):
            memory[:] = payload

    def put_staged(self) -> None:
        """Put what ``stage`` wrote."""
        self._put(self._staged)

    def _put(self, payloads: Sequence[object]) -> None:
        chain = next(self._chains)
        _require(self._client.put(self._namespace, PutBlocks(chain.keys, chain.parents, payloads)).outcomes)


def _calls(client: Client, effort: Effort) -> list[Row]:
    namespace, chain = fill(client, "call", 4 * DESCRIPTORS, 4096)
    following = batches(chain.keys, DESCRIPTORS)
    lease = client.grant_lease("kvbench calls", 60_000)

    def fetch() -> None:
        keys = following()
        _fetch(client, namespace, keys, lease)
        client.post(client.operations.release(lease, namespace, keys))

    # A request of 64 keys and a reply of 64 places, as they are on the wire.
    with echo(64 * 11) as call:
        seconds = take_turns({"call": fetch, "echo": lambda: call(bytes(64 * 32 + 60))}, effort.calls, warm_up=50)
    client.release(lease)
    return [
        Row(
            bench="store",
            case=f"local call, 64 descriptors, {name}",
            value=pick(seconds["call"]) * 1e3,
            unit="ms",
            limit=pick(seconds["echo"]) * 1e3,
            limit_unit="ms",
            limit_name="echo of the same size, raw socket",
            target=target,
            peers=peers.CALL_64_P50_MS if name == "p50" else {},
            conditions={"call": "fetch in place, 64 blocks pinned; release posted", "calls": effort.calls},
        )
        for name, pick, target in (
            ("p50", median, "<= 0.25 ms"),
            ("p99", lambda values: percentile(values, 0.99), ""),
        )
    ]


def _matches(client: Client, socket: str, effort: Effort) -> list[Row]:
    options = ClientOptions(name="kvbench grpc", strict=True, buffer_bytes=0, device=False, control=Control.GRPC)

    def match(by: Client, keys: Sequence[BlockKey], *, mapped: bool = False) -> None:
        found = by.match(namespace, keys) if mapped else by.run(by.operations.match(namespace, keys))
        if found.matched != len(keys):
            raise Unavailable("blocks were dropped while they were matched: run kvbench on a daemon of its own")

    with Client(socket, options) as grpc, echo(MATCH_KEYS + 8) as call, neighbour(socket):
        namespace, chain = fill(client, "match", MATCH_KEYS, 4096, grpc)
        # Held, since a match renews nothing: what the neighbour stores would push these blocks out.
        lease = client.grant_lease("kvbench matches", 600_000)
        client.hold(lease, namespace, chain.keys)
        request = bytes(MATCH_KEYS * 32 + 40)
        seconds = take_turns(
            {
                "mapped": lambda: match(client, chain.keys, mapped=True),
                "look up": lookups(chain.keys),
                "local": lambda: match(client, chain.keys),
                "echo": lambda: call(request),
                "grpc": lambda: match(grpc, chain.keys),
                "grpc 1": lambda: match(grpc, chain.keys[:1]),
            },
            effort.calls,
            warm_up=50,
        )
        client.release(lease)
    rows = []
    for path, base, base_name, targets in (
        ("mapped", "look up", "512 dictionary look-ups", {"p50": "<= 0.05 ms", "p99": "<= 0.2 ms"}),
        ("local", "echo", "echo of the same size, raw socket", {"p99": "p99 < 1 ms"}),
        ("grpc", "grpc 1", "match of 1 key over gRPC", {"p50": "<= 0.8 ms", "p99": "p99 < 3 ms"}),
    ):
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            published = peers.EXISTS_512_P50_MS if share == 0.5 else peers.EXISTS_512_P99_MS
            rows.append(
                Row(
                    bench="store",
                    case=f"match 512 keys, {path}, {name}, under load",
                    value=percentile(seconds[path], share) * 1e3,
                    unit="ms",
                    limit=percentile(seconds[base], share) * 1e3,
                    limit_unit="ms",
                    limit_name=base_name,
                    target=targets.get(name, ""),
                    peers=published if path == "local" else {},
                    conditions={"calls": effort.calls, "load": "one client putting and getting 4 x 1 MiB"},
                )
            )
    return rows


def _matches_inside(effort: Effort) -> list[Row]:
    """Matches in a store of this process, without a transport, while another thread commits blocks to it."""
    spec = opaque_spec("inside", block_bytes=4096)
    chain = Chain.fresh(spec, MATCH_KEYS)
    with store_inside(128 << 20) as cache:
        namespace = fill_inside(cache, spec, chain)
        # Held, so that what the other thread commits evicts its own blocks and not these.
        cache.hold(cache.grant_lease("kvbench", 600_000), namespace, chain.keys)
        cases = {"match": matcher(cache, namespace, chain.keys), "look up": lookups(chain.keys)}
        with busy(putter(cache, opaque_spec("inside-load"), 4), 1):
            seconds = take_turns(cases, effort.calls, warm_up=50)
    return [
        Row(
            bench="store",
            case=f"match 512 keys, in the store, {name}, under load",
            value=percentile(seconds["match"], share) * 1e3,
            unit="ms",
            limit=percentile(seconds["look up"], share) * 1e3,
            limit_unit="ms",
            limit_name="512 dictionary look-ups",
            target="p99 < 0.3 ms" if name == "p99" else "",
            conditions={"calls": effort.calls, "load": "a thread of the same process committing 4 x 1 MiB"},
        )
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def _fetch(client: Client, namespace: NamespaceId, keys: Sequence[BlockKey], lease: LeaseId) -> None:
    _require(client.fetch(namespace, keys, Target.IN_PLACE, lease_id=lease).outcomes)


def _require(outcomes: Sequence[Outcome]) -> None:
    if any(outcome is not Outcome.HIT for outcome in outcomes):
        raise Unavailable("a block that was stored is not there: run kvbench on a daemon of its own")
