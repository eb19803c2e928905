"""The client for engines: scattered blocks, lookups that hold, and a daemon that is away, hangs or comes back."""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading

import numpy as np
import pytest

from kvstore.client import Client, ClientOptions, EngineClient, Pieces, PutBlocks
from kvstore.core.errors import InvalidArgument, UnknownNamespace
from kvstore.core.keys import parents_of
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import BATCH_KEYS_MAX, Durability, Outcome, Reason, Tier
from kvstore.v1 import admin_pb2
from tests.client.harness import DaemonProcess, ask, chain, small_spec, until

HIT, MISS, BUSY = Outcome.HIT, Outcome.MISS, Outcome.BUSY
LAYERS, PIECE = 5, 3000
_salts = itertools.count()


class Pages:
    """An engine's memory: a cache a layer, of pages; a block is the same page of each."""

    def __init__(self, pages: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.caches = [rng.integers(0, 255, (pages, PIECE), np.uint8) for _ in range(LAYERS)]

    def at(self, *pages: int) -> Pieces:
        return Pieces.of([cache.reshape(-1).data for cache in self.caches], [n * PIECE for n in pages], PIECE)

    def block(self, page: int) -> bytes:
        return b"".join(cache[page].tobytes() for cache in self.caches)


def engine_spec(**changes):
    fields = {"layers": LAYERS, "opaque_slice_bytes": PIECE, "salt": f"engine {next(_salts)}".encode()}
    return small_spec(**{**fields, **changes})


@pytest.fixture
def engine(daemon):
    with EngineClient(daemon.socket, ClientOptions(name="engine", device=False)) as client:
        assert client.wait_ready(20)
        yield client
        assert client.failures() == {}


def test_scattered_blocks_go_there_and_back(engine):
    namespace = engine.open_namespace(engine_spec())
    keys, tokens = chain(namespace, 6)
    mine, theirs = Pages(10, 1), Pages(10, 2)
    stored = engine.store(namespace, keys, None, mine.at(3, 9, 0, 5, 6, 2), token_ids=tokens)
    assert stored.taken == 6
    expected = [mine.block(page) for page in (3, 9, 0, 5, 6, 2)]
    # They were read before store returned.
    for cache in mine.caches:
        cache[:] = 0
    assert stored.result(20) == (HIT,) * 6
    before = [theirs.block(page) for page in range(10)]
    absent, _ = chain(namespace, 1, seed=9)
    loaded = engine.load(namespace, [*keys[:2], *absent, *keys[2:]], theirs.at(0, 1, 4, 2, 3, 8, 7))
    assert loaded.result(20) == (HIT, HIT, MISS, HIT, HIT, HIT, HIT)
    assert loaded.reasons[2] is Reason.NEVER_STORED
    assert [theirs.block(page) for page in (0, 1, 2, 3, 8, 7)] == expected
    assert [theirs.block(page) for page in (4, 5, 6, 9)] == [before[page] for page in (4, 5, 6, 9)]
    assert set(engine.step()) == {stored, loaded}
    assert engine.step() == []


def test_the_descriptor_tells_what_step_has(engine):
    namespace = engine.open_namespace(engine_spec())
    keys, _ = chain(namespace, 1)
    stored = engine.store(namespace, keys, None, Pages(1).at(0))
    poller = select.epoll()
    poller.register(engine.fileno(), select.EPOLLIN)
    assert poller.poll(20)
    assert engine.step() == [stored]
    assert not poller.poll(0)
    poller.close()


def test_a_lookup_over_shards_answers_the_run_that_all_have_and_holds_it(engine, daemon, watcher):
    specs = [engine_spec(shard_count=2, shard_index=n) for n in range(2)]
    shards = [engine.open_namespace(one) for one in specs]
    for one in specs:
        watcher.open_namespace(one)
    keys = [chain(namespace, 5)[0] for namespace in shards]
    pages = Pages(5)
    for namespace, mine, count in zip(shards, keys, (5, 3), strict=True):
        assert engine.store(namespace, mine[:count], None, pages.at(*range(count))).result(20) == (HIT,) * count
    found = engine.lookup(shards, keys, hold=True)
    assert (found.matched, found.held, found.reason) == (3, True, Reason.NEVER_STORED)
    assert found.resident(Tier.HOST)
    for namespace, mine in zip(shards, keys, strict=True):
        assert watcher.remove(namespace, mine[:3]) == (Outcome.BUSY,) * 3
    found.release()
    found.release()
    until(lambda: watcher.remove(shards[0], keys[0][:3]) == (HIT,) * 3)
    again = engine.lookup(shards, keys)
    assert (again.matched, again.held, again.residency) == (0, False, ())
    # The lease is kept for the next lookup, and holds nothing meanwhile.
    assert ask(watcher, "Status", admin_pb2.StatusResponse).leases == 1


def test_held_blocks_are_renewed_by_themselves(daemon, watcher):
    options = ClientOptions(name="engine", device=False, lease_ttl_ms=400)
    with EngineClient(daemon.socket, options) as engine:
        assert engine.wait_ready(20)
        spec = engine_spec()
        namespace = engine.open_namespace(spec)
        watcher.open_namespace(spec)
        keys, _ = chain(namespace, 1)
        assert engine.store(namespace, keys, None, Pages(1).at(0)).result(20) == (HIT,)
        with engine.lookup([namespace], [keys], hold=True) as found:
            renewed = found.lease.renewed
            until(lambda: found.lease.renewed > renewed + 1.0)
            assert found.held
            assert watcher.remove(namespace, keys) == (BUSY,)


def test_more_keys_than_a_call_takes(engine):
    namespace = engine.open_namespace(engine_spec())
    keys, _ = chain(namespace, BATCH_KEYS_MAX + 3)
    pages = Pages(4)
    assert engine.store(namespace, keys[:4], None, pages.at(0, 1, 2, 3)).result(20) == (HIT,) * 4
    assert engine.lookup([namespace], [keys], hold=True).matched == 4
    first = (keys[3], *keys[: BATCH_KEYS_MAX - 2], keys[0], keys[1], *keys[BATCH_KEYS_MAX:])
    target = Pages(len(first), 7)
    outcomes = engine.load(namespace, first, target.at(*range(len(first)))).result(20)
    hits = [i for i, outcome in enumerate(outcomes) if outcome is HIT]
    assert hits == [0, 1, 2, 3, 4, BATCH_KEYS_MAX - 1, BATCH_KEYS_MAX]
    wanted = [3, 0, 1, 2, 3, 0, 1]
    assert [target.block(i) for i in hits] == [pages.block(n) for n in wanted]


def test_a_key_that_is_there_twice_is_stored_once(engine, watcher):
    namespace = engine.open_namespace(engine_spec())
    keys, _ = chain(namespace, 3)
    pages = Pages(6)
    repeated, parents = [keys[n] for n in (0, 1, 1, 0, 2)], [bytes(32), keys[0], keys[0], bytes(32), keys[1]]
    twice = engine.store(namespace, repeated, parents, pages.at(0, 1, 1, 0, 2))
    again = engine.store(namespace, keys, None, pages.at(0, 1, 2))
    assert twice.result(20) == (HIT,) * 5
    assert again.result(20) == (HIT,) * 3
    # Sessions of earlier tests may be ending still.
    until(lambda: ask(watcher, "Status", admin_pb2.StatusResponse).reservations == 3)


def test_what_does_not_fit_is_refused_before_anything_moves(engine):
    namespace = engine.open_namespace(engine_spec())
    keys, _ = chain(namespace, 2)
    pages = Pages(3)
    with pytest.raises(InvalidArgument, match="source"):
        engine.store(namespace, keys, None, pages.at(0))
    with pytest.raises(InvalidArgument, match="parents"):
        engine.store(namespace, keys, keys[:1], pages.at(0, 1))
    with pytest.raises(InvalidArgument, match="read-only"):
        engine.load(namespace, keys[:1], Pieces.of([bytes(LAYERS * PIECE)], [0], LAYERS * PIECE))
    with pytest.raises(UnknownNamespace):
        engine.load(bytes(32), keys, pages.at(0, 1))
    with pytest.raises(InvalidArgument, match="share memory"):
        EngineClient("grpc://127.0.0.1:1")
    coded = engine.open_namespace(small_spec(codec="int8", salt=b"coded"))
    whole = BlockLayout.of(small_spec()).raw_slice_bytes * 3
    with pytest.raises(InvalidArgument, match="raw blocks"):
        engine.load(coded, keys[:1], Pieces.of([bytearray(whole)], [0], whole))


def test_what_the_buffer_has_no_room_for_is_busy_and_can_be_offered_again(daemon):
    stored_bytes = BlockLayout.of(engine_spec()).raw_stored_bytes
    with EngineClient(daemon.socket, ClientOptions(device=False, buffer_bytes=6 * stored_bytes)) as engine:
        assert engine.wait_ready(20)
        namespace = engine.open_namespace(engine_spec())
        keys, _ = chain(namespace, 8)
        pages, begin = Pages(8), 0
        while begin < 8:
            left = range(begin, 8)
            parents = [bytes(32), *keys][begin:8]
            stored = engine.store(namespace, keys[begin:], parents, pages.at(*left))
            assert stored.result(20) == (HIT,) * stored.taken + (BUSY,) * (len(left) - stored.taken)
            assert 0 < stored.taken <= 3
            begin += stored.taken
        assert engine.lookup([namespace], [keys]).matched == 8


def test_more_blocks_than_host_can_pin_are_loaded_in_windows(tmp_path):
    spec = engine_spec(layers=LAYERS, opaque_slice_bytes=PIECE)
    with_ssd = [f"--ssd-dir={tmp_path / 'ssd'}", "--ssd=64MiB", "--host=1MiB", "--device=0"]
    process = DaemonProcess(tmp_path, *with_ssd)
    process.start()
    try:
        with EngineClient(process.socket, ClientOptions(device=False, buffer_bytes=1 << 20)) as engine:
            assert engine.wait_ready(20)
            namespace = engine.open_namespace(spec)
            keys, _ = chain(namespace, 90)
            pages = Pages(90)
            with Client(process.socket, ClientOptions(strict=True, device=False)) as writer:
                writer.open_namespace(spec)
                blocks = [pages.block(n) for n in range(90)]
                for begin in range(0, 90, 15):
                    part = slice(begin, begin + 15)
                    put = PutBlocks(keys[part], parents_of(keys)[part], blocks[part], durability=Durability.DURABLE)
                    assert writer.put(namespace, put).outcomes == (HIT,) * 15
            target = Pages(90, 5)
            loaded = engine.load(namespace, keys, target.at(*range(90)), 20.0)
            assert loaded.result(30) == (HIT,) * 90
            assert [target.block(n) for n in range(90)] == blocks
    finally:
        process.stop()


# ---------------------------------------------------------------- a daemon that is away


def test_no_daemon_then_one_then_none_then_another(tmp_path):
    process = DaemonProcess(tmp_path, "--ssd=64MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    pages = Pages(3)
    with EngineClient(process.socket, ClientOptions(device=False)) as engine:
        namespace = engine.open_namespace(engine_spec())
        keys, _ = chain(namespace, 3)
        number = engine.fileno()

        def misses() -> None:
            assert engine.store(namespace, keys, None, pages.at(0, 1, 2)).outcomes == (MISS,) * 3
            assert engine.load(namespace, keys, pages.at(0, 1, 2)).outcomes == (MISS,) * 3
            assert engine.lookup([namespace], [keys], hold=True).reason is Reason.TIER_UNAVAILABLE
            assert len(engine.step()) == 2

        misses()
        process.start()
        try:
            assert engine.wait_ready(20)
            assert engine.store(namespace, keys, None, pages.at(0, 1, 2)).result(20) == (HIT,) * 3
            found = engine.lookup([namespace], [keys], hold=True)
            assert found.matched == 3
            with Client(process.socket) as other:
                other.flush()
            process.kill()
            until(lambda: not engine.usable)
            engine.step()
            misses()
            process.start()
            assert engine.wait_ready(20)
            assert engine.load(namespace, keys, Pages(3, 4).at(0, 1, 2)).result(20) == (HIT,) * 3
            found.release()
            assert engine.fileno() == number
        finally:
            process.stop()


def test_a_daemon_that_hangs_costs_one_deadline_and_is_found_when_it_answers(tmp_path):
    process = DaemonProcess(tmp_path)
    process.start()
    try:
        with EngineClient(process.socket, ClientOptions(device=False), deadline_s=0.2) as engine:
            assert engine.wait_ready(20)
            namespace = engine.open_namespace(engine_spec())
            keys, _ = chain(namespace, 2)
            pages = Pages(2)
            assert engine.store(namespace, keys, None, pages.at(0, 1)).result(20) == (HIT, HIT)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                under_way = engine.load(namespace, keys, Pages(2, 1).at(0, 1))
                assert engine.lookup([namespace], [keys]).matched == 0
                assert under_way.result(20) == (MISS, MISS)
                timed_out = sum(engine.failures().values())
                assert 1 <= timed_out <= 2
                for _ in range(50):
                    assert engine.lookup([namespace], [keys]).matched == 0
                    assert engine.load(namespace, keys, pages.at(0, 1)).done()
                # None of them waited for an answer: only probes may have failed since.
                later = engine.failures()
                assert sum(n for name, n in later.items() if not name.startswith("probe")) == timed_out
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert engine.wait_ready(20)
            assert engine.load(namespace, keys, pages.at(0, 1)).result(20) == (HIT, HIT)
    finally:
        process.stop()


def test_the_child_of_a_fork_has_a_session_of_its_own(engine):
    namespace = engine.open_namespace(engine_spec())
    keys, _ = chain(namespace, 2)
    pages = Pages(2)
    assert engine.store(namespace, keys, None, pages.at(0, 1)).result(20) == (HIT, HIT)
    child = os.fork()
    if child == 0:
        good = engine.wait_ready(20)
        target = Pages(2, 3)
        good = good and engine.load(namespace, keys, target.at(1, 0)).result(20) == (HIT, HIT)
        good = good and target.block(1) == pages.block(0) and len(engine.step()) == 1
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.load(namespace, keys, Pages(2, 3).at(0, 1)).result(20) == (HIT, HIT)
    assert len(engine.step()) == 2


def test_close_ends_what_is_under_way(daemon):
    engine = EngineClient(daemon.socket, ClientOptions(device=False))
    assert engine.wait_ready(20)
    namespace = engine.open_namespace(engine_spec())
    keys, _ = chain(namespace, 40)
    transfers = [engine.load(namespace, keys, Pages(40).at(*range(40))) for _ in range(5)]
    engine.close()
    engine.close()
    assert all(transfer.done() for transfer in transfers)
    assert set(engine.step()) == set(transfers)
    assert engine.load(namespace, keys, Pages(40).at(*range(40))).outcomes == (MISS,) * 40
    assert not any(thread.name == "kvstore-engine" for thread in threading.enumerate())
