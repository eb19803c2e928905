"""Matches that are no calls: the same answers as the daemon's, and none of a daemon that has gone."""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import random
import signal
import socket
import time
from typing import Any

import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, PutBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import parents_of
from kvstore.core.types import Durability, Reason
from kvstore.kernels import native
from kvstore.v1 import admin_pb2, inspect_pb2, session_pb2
from kvstore.wire.framing import PROTOCOL_VERSION, FrameKind, pack_frame
from tests.client.harness import DaemonProcess, ask, blocks_of, chain, small_spec

pytestmark = pytest.mark.skipif(not native.available(), reason="the index is mapped by the C++ extension")
OPTIONS = ClientOptions(strict=True, buffer_bytes=1 << 20)


def calls(client: Client) -> list[str]:
    """Names of the calls that this client makes from now on."""
    made: list[str] = []
    link = client.connection()[0]
    plain = link.call

    def counted(method, *arguments):
        made.append(method.partition("/")[2])
        return plain(method, *arguments)

    link.call = counted
    return made


def put(client: Client, seed: int = 0, blocks: int = 40, **more: object):
    opened = client.open_namespace(small_spec())
    keys, _ = chain(opened.namespace_id, blocks, seed=seed)
    client.put(opened.namespace_id, blocks_of(opened.layout, keys, **more))
    return opened.namespace_id, keys


def test_what_is_there_is_matched_without_a_call(daemon):
    with Client(daemon.socket, OPTIONS) as client:
        namespace, keys = put(client)
        whole = client.match(namespace, keys)
        made = calls(client)
        assert client.match(namespace, keys) == whole
        assert whole.matched == len(keys)
        assert made == []


def test_the_rest_of_a_run_is_asked_for_and_the_reason_is_the_daemons(daemon):
    with Client(daemon.socket, OPTIONS) as client:
        namespace, keys = put(client)
        made = calls(client)
        client.remove(namespace, keys[30:])
        made.clear()
        found = client.match(namespace, keys)
        assert (found.matched, len(found.residency), found.reason) == (30, 30, Reason.REMOVED)
        assert made == ["Match"]
        none = client.match(namespace, keys[30:])
        assert (none.matched, none.reason) == (0, Reason.REMOVED)


def test_the_daemon_is_told_of_what_was_found_without_it(ssd_daemon):
    with Client(ssd_daemon.socket, OPTIONS) as client:
        namespace, keys = put(client)
        for _ in range(3):
            client.match(namespace, keys)
        client.match(namespace, [*keys, b"u" * 32])
        counters = ask(client, "Status", admin_pb2.StatusResponse).counters
        assert (counters["match_found"], counters["match_missed_never_stored"]) == (4 * len(keys), 1)


def test_namespaces_do_not_meet(daemon):
    with Client(daemon.socket, OPTIONS) as client:
        _, keys = put(client)
        other = client.open_namespace(small_spec(salt=b"other")).namespace_id
        assert client.match(other, keys).matched == 0
        unknown = b"u" * 32
        assert client.flows.matches._mapped(unknown, keys) == ()


@pytest.mark.parametrize(
    "keys", [[], [b"short"], ["text" * 8], [b"k" * 32] * 5000], ids=["none", "short", "text", "many"]
)
def test_bad_keys_are_refused_as_by_a_call(daemon, keys):
    with Client(daemon.socket, OPTIONS) as client:
        namespace, _ = put(client, blocks=2)
        mapped = outcome(client, namespace, keys)
        client.connection()[0].welcome = without_index(client)
        assert mapped == outcome(client, namespace, keys)


def outcome(client, namespace, keys):
    try:
        return client.match(namespace, keys)
    except InvalidArgument as error:
        return str(error)


def without_index(client):
    return type(client.connection()[0].welcome)(b"", b"", client.connection()[0].welcome.arenas, "")


def test_a_daemon_that_has_gone_has_nothing_and_the_next_one_is_mapped_anew(tmp_path):
    daemon = DaemonProcess(tmp_path, "--ssd=64MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    daemon.start()
    try:
        with Client(daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
            namespace, keys = put(client, durability=Durability.DURABLE)
            link = client.connection()[0]
            daemon.kill()
            assert link.welcome.index.match(0, namespace, keys, -1) != (), "its memory is still what it was"
            assert client.match(namespace, keys).matched == 0
            daemon.start()
            client.close()
            with Client(daemon.socket, OPTIONS) as again:
                again.open_namespace(small_spec())
                made = calls(again)
                assert again.match(namespace, keys).matched == len(keys)
                assert made == []
    finally:
        daemon.stop()


def test_a_daemon_that_stands_still_answers_what_its_index_says(daemon):
    with Client(daemon.socket, OPTIONS) as client:
        namespace, keys = put(client)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert client.match(namespace, keys).matched == len(keys)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_matches_that_are_recorded_are_calls(ssd_daemon):
    with Client(ssd_daemon.socket, OPTIONS) as client:
        namespace, keys = put(client)
        made = calls(client)
        ask(client, "Trace", inspect_pb2.TraceResponse)
        made.clear()
        assert client.match(namespace, keys).matched == len(keys)
        assert made == ["Match"]
        (entry,) = ask(client, "Trace", inspect_pb2.TraceResponse).entries
        assert entry.matched == len(keys)


def test_a_daemon_may_keep_its_index(tmp_path):
    daemon = DaemonProcess(tmp_path, "--no-index-map")
    daemon.start()
    try:
        with Client(daemon.socket, OPTIONS) as client:
            namespace, keys = put(client)
            made = calls(client)
            assert client.connection()[0].welcome.index is None
            assert client.match(namespace, keys).matched == len(keys)
            assert made == ["Match"]
    finally:
        daemon.stop()


def test_nobody_can_change_or_shrink_what_is_mapped(daemon):
    hello = session_pb2.Hello(protocol_version=PROTOCOL_VERSION, buffer_bytes=4096, index=True)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(20)
        raw.connect(str(daemon.socket))
        raw.sendall(pack_frame(1, FrameKind.HELLO, hello.SerializeToString()))
        _, fds, _, _ = socket.recv_fds(raw, 65536, 8)
        try:
            size = os.fstat(fds[-1]).st_size
            for wrong in (0, size + 4096):
                with pytest.raises(PermissionError):
                    os.ftruncate(fds[-1], wrong)
            with pytest.raises(PermissionError):
                mmap.mmap(fds[-1], size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fds[-1], b"x", 0)
            native.mapped_index(fds[-1])
        finally:
            for fd in fds:
                os.close(fd)


ALWAYS = 64
MINUTES = 10


def read_on(path: str, found_wrong: Any, ended: Any) -> None:
    """Match, in a process of its own, runs that begin with blocks that stay and go on with such as come and go."""
    with Client(path, OPTIONS) as client:
        namespace = client.open_namespace(small_spec()).namespace_id
        stay, strange = chain(namespace, ALWAYS)[0], chain(namespace, 64, seed=999)[0]
        coming = [chain(namespace, 48, seed=seed)[0] for seed in range(1, 40)]
        chance = random.Random(os.getpid())
        while not ended.is_set():
            keys = chance.choice(coming)
            found = client.flows.matches._mapped(namespace, stay + keys)
            # The daemon changes its index all the time: what is found may be cut short, and is never wrong.
            wrong = len(found) > ALWAYS + len(keys) or 0 in found or client.flows.matches._mapped(namespace, strange)
            whole = client.match(namespace, stay).matched
            if wrong or whole != ALWAYS:
                found_wrong.put((whole, found))
                return


LONG = [pytest.mark.slow, pytest.mark.timeout(60 * (MINUTES + 5))]


@pytest.mark.parametrize("seconds", [2, pytest.param(60 * MINUTES, marks=LONG)])
def test_readers_in_other_processes_find_nothing_wrong_while_blocks_come_and_go(tmp_path, seconds):
    daemon = DaemonProcess(tmp_path, "--lease-ttl-max-s=1200")
    daemon.start()
    spawn = multiprocessing.get_context("spawn")
    found_wrong, ended = spawn.Queue(), spawn.Event()
    readers = [spawn.Process(target=read_on, args=(str(daemon.socket), found_wrong, ended)) for _ in range(2)]
    try:
        with Client(daemon.socket, OPTIONS) as client:
            namespace, stay = put(client, blocks=ALWAYS)
            client.hold(client.grant_lease("stay", 60_000 * (MINUTES + 5)), namespace, stay)
            for reader in readers:
                reader.start()
            chance, until = random.Random(1), time.monotonic() + seconds
            size = client.flows.known(namespace).layout
            payloads = [bytes(size.layers * size.raw_slice_bytes)] * 48
            while time.monotonic() < until and all(reader.is_alive() for reader in readers):
                # More than HOST holds: others go by eviction.
                keys, _ = chain(namespace, 48, seed=chance.randrange(1, 40))
                client.put(namespace, PutBlocks(keys, parents_of(keys), payloads))
                if chance.random() < 0.3:
                    client.remove(namespace, keys)
            ended.set()
            for reader in readers:
                reader.join(30)
            assert [reader.exitcode for reader in readers] == [0, 0]
            assert found_wrong.empty()
    finally:
        ended.set()
        for reader in readers:
            reader.join()
        daemon.stop()


def test_asyncio_matches_without_a_call_too(daemon):
    async def work() -> None:
        async with AsyncClient(daemon.socket, OPTIONS) as client:
            opened = await client.open_namespace(small_spec())
            keys, _ = chain(opened.namespace_id, 8)
            await client.put(opened.namespace_id, blocks_of(opened.layout, keys))
            link = client.flows.link
            plain, made = link.send, []

            async def counted(method, *arguments):
                made.append(method)
                return await plain(method, *arguments)

            link.send = counted
            assert (await client.match(opened.namespace_id, keys)).matched == len(keys)
            assert made == []

    asyncio.run(work())
