"""Blocks that are put from where they were written: the session's buffer."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, PutBlocks, Staged
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.core.keys import parents_of
from kvstore.core.types import Outcome, Reason
from tests.client.harness import blocks_of, chain, payload, rights, until

OPTIONS = ClientOptions(strict=True, buffer_bytes=1 << 20)


def write(staged: Staged, keys: list[bytes]) -> None:
    """The bytes of each key, layer by layer."""
    size = staged.layout.raw_slice_bytes
    for i, key in enumerate(keys):
        whole = payload(staged.layout, key)
        for layer in range(staged.layout.layers):
            staged.layer(i, layer)[:] = whole[layer * size : (layer + 1) * size]


def idle(client: Client) -> int:
    """Places that the client keeps for its next put."""
    return len(client.flows.puts._standing._idle)


def at_rest(watcher: Client) -> tuple[int, int]:
    """Nothing is held, once the sessions of earlier tests have ended."""
    until(lambda: rights(watcher) == (0, 0))
    return (0, 0)


@pytest.fixture
def client(daemon):
    with Client(daemon.socket, OPTIONS) as made:
        yield made


def test_what_was_written_in_the_buffer_is_what_is_stored(client, spec):
    opened = client.open_namespace(spec)
    keys, tokens = chain(opened.namespace_id, 5)
    with client.stage(opened.namespace_id, 8) as staged:
        assert len(staged) == 8
        write(staged, keys)
        stored = client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged, token_ids=tokens))
        assert len(staged) == 0
    assert stored.outcomes == (Outcome.HIT,) * 5
    got = client.get(opened.namespace_id, keys)
    assert [bytes(data) for data in got.payloads] == [payload(opened.layout, key) for key in keys]


def test_a_block_is_one_piece_of_memory_with_slices_a_stride_apart(client, spec):
    opened = client.open_namespace(spec)
    (key,), _ = chain(opened.namespace_id, 1)
    layers, size = opened.layout.layers, opened.layout.raw_slice_bytes
    with client.stage(opened.namespace_id, 1) as staged:
        memory = staged[0]
        assert len(memory) == (layers - 1) * staged.stride + size
        rows = np.ndarray((layers, size), np.uint8, memory, strides=(staged.stride, 1))
        rows[:] = np.frombuffer(payload(opened.layout, key), np.uint8).reshape(layers, size)
        del rows
        client.put(opened.namespace_id, PutBlocks([key], parents_of([key]), staged))
    assert bytes(client.get(opened.namespace_id, [key]).payloads[0]) == payload(opened.layout, key)


@pytest.mark.parametrize("size", [1, 63, 4095, 4097, 100_001])
def test_slices_of_odd_sizes_are_stored_as_they_are(client, spec, size):
    opened = client.open_namespace(replace(spec, dtype="opaque", opaque_slice_bytes=size))
    keys, _ = chain(opened.namespace_id, 2)
    with client.stage(opened.namespace_id, 1) as staged:
        # What an earlier block left between and behind the slices is no part of this one.
        staged[0][:] = b"\xff" * len(staged[0])
        write(staged, keys[:1])
        assert client.put(opened.namespace_id, PutBlocks(keys[:1], parents_of(keys[:1]), staged)).outcomes == (
            Outcome.HIT,
        )
    (got,) = client.get(opened.namespace_id, keys[:1]).payloads
    assert bytes(got) == payload(opened.layout, keys[0])


@pytest.mark.parametrize("end", ["put some", "nothing", "error"])
def test_every_place_goes_back_however_it_ends(client, watcher, spec, end):
    opened = client.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, 3)
    before = at_rest(watcher)
    try:
        with client.stage(opened.namespace_id, 6) as staged:
            write(staged, keys)
            if end == "error":
                raise RuntimeError("the caller's own")
            if end == "put some":
                client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
    except RuntimeError:
        assert end == "error"
    until(lambda: rights(watcher) == (before[0], before[1] + idle(client)))
    assert idle(client) == (3 if end == "put some" else 0)


def test_a_client_that_is_closed_gives_its_stage_back_and_can_not_put_it(daemon, watcher, spec):
    before = at_rest(watcher)
    with Client(daemon.socket, OPTIONS) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        staged = client.stage(opened.namespace_id, 2)
        write(staged, keys)
        assert rights(watcher) == (before[0], before[1] + 2)
    until(lambda: rights(watcher) == before)
    with staged, pytest.raises(Unavailable):
        client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
    assert len(staged) == 0
    assert watcher.open_namespace(spec)
    assert watcher.match(opened.namespace_id, keys).matched == 0


def test_a_process_that_is_killed_gives_its_stage_back(daemon, watcher, spec):
    before = at_rest(watcher)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client = Client(daemon.socket, OPTIONS)
            staged = client.stage(client.open_namespace(spec).namespace_id, 3)
            os.write(tell, bytes([len(staged)]))
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(told, 1) == b"\x03"
    os.close(told)
    os.close(tell)
    assert rights(watcher) == (before[0], before[1] + 3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: rights(watcher) == before)


def test_a_put_that_gets_no_answer_in_time_leaves_its_places_to_the_late_reply(ssd_daemon, spec):
    options = replace(OPTIONS, strict=False, timeout_s=0.5)
    with Client(ssd_daemon.socket, options) as client, Client(ssd_daemon.socket, ClientOptions(strict=True)) as other:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        before = rights(other)
        with client.stage(opened.namespace_id, 3) as staged:
            write(staged, keys)
            os.kill(ssd_daemon.pid, signal.SIGSTOP)
            try:
                stored = client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
            finally:
                os.kill(ssd_daemon.pid, signal.SIGCONT)
            assert set(stored.outcomes) == {Outcome.MISS}
            assert len(staged) == 0
        # The late reply is taken in when the client next looks.
        until(lambda: client.poll() == [] and rights(other) == (before[0], before[1] + idle(client)))
        until(lambda: client.put(opened.namespace_id, blocks_of(opened.layout, keys)).outcomes == (Outcome.HIT,) * 2)
        got = client.get(opened.namespace_id, keys)
        assert [bytes(data) for data in got.payloads] == [payload(opened.layout, key) for key in keys]


def test_a_stage_is_put_once_and_not_beyond_its_end(client, spec):
    opened = client.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, 2)
    blocks = PutBlocks(keys, parents_of(keys), client.stage(opened.namespace_id, 2))
    write(blocks.payloads, keys)
    client.put(opened.namespace_id, blocks)
    with pytest.raises(InvalidArgument, match="staged and not put yet"):
        client.put(opened.namespace_id, blocks)
    with pytest.raises(IndexError):
        blocks.payloads[0]


def test_what_does_not_fit_is_refused_and_can_be_put_right(client, spec):
    opened = client.open_namespace(spec)
    other = client.open_namespace(replace(spec, salt=b"other"))
    keys, _ = chain(opened.namespace_id, 3)
    for count in (0, -1, 5000, 1.5, True):
        with pytest.raises(InvalidArgument, match="count"):
            client.stage(opened.namespace_id, count)
    with client.stage(opened.namespace_id, 2) as staged:
        with pytest.raises(InvalidArgument, match="keys"):
            client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
        with pytest.raises(InvalidArgument, match="parents"):
            client.put(opened.namespace_id, PutBlocks(keys[:2], parents_of(keys), staged))
        with pytest.raises(InvalidArgument, match="token_ids"):
            client.put(opened.namespace_id, PutBlocks(keys[:2], parents_of(keys[:2]), staged, token_ids=[1, 2, 3]))
        with pytest.raises(InvalidArgument, match="namespace_id"):
            client.put(other.namespace_id, PutBlocks(keys[:2], parents_of(keys[:2]), staged))
        with pytest.raises(InvalidArgument, match="layer"):
            staged.layer(0, opened.layout.layers)
        write(staged, keys[:2])
        assert (
            client.put(opened.namespace_id, PutBlocks(keys[:2], parents_of(keys[:2]), staged)).outcomes[1]
            is Outcome.HIT
        )


def test_a_full_buffer_gives_fewer_places_and_a_put_beside_it_still_works(client, spec):
    opened = client.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, 4)
    with client.stage(opened.namespace_id, 4096) as staged:
        assert 0 < len(staged) < 4096
        stored = client.put(
            opened.namespace_id, PutBlocks(keys, parents_of(keys), [payload(opened.layout, key) for key in keys])
        )
        assert stored.outcomes == (Outcome.HIT,) * 4
        write(staged, keys)
    assert bytes(client.get(opened.namespace_id, keys[3:]).payloads[0]) == payload(opened.layout, keys[3])


def test_a_client_without_shared_memory_is_refused(daemon, spec):
    with Client(f"grpc://127.0.0.1:{daemon.port}", ClientOptions(strict=True)) as remote:
        opened = remote.open_namespace(spec)
        with pytest.raises(InvalidArgument, match="session socket"):
            remote.stage(opened.namespace_id, 1)


def test_a_daemon_that_went_meanwhile_is_a_miss(ssd_daemon, spec):
    with Client(ssd_daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        with client.stage(opened.namespace_id, 2) as staged:
            write(staged, keys)
            ssd_daemon.kill()
            stored = client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
            assert set(stored.outcomes) == {Outcome.MISS}
        assert len(client.stage(opened.namespace_id, 2)) == 0
        ssd_daemon.start()
        until(lambda: len(client.stage(opened.namespace_id, 1)) == 1)
        assert client.get(opened.namespace_id, keys).outcomes == (Outcome.MISS,) * 2


def test_a_restart_between_stage_and_put_stores_nothing(ssd_daemon, spec):
    with Client(ssd_daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 2)
        staged = client.stage(opened.namespace_id, 2)
        write(staged, keys)
        ssd_daemon.kill()
        ssd_daemon.start()
        until(
            lambda: (
                client.wait_ready(20.0)
                and client.match(opened.namespace_id, keys).reason is not Reason.TIER_UNAVAILABLE
            )
        )
        stored = client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
        assert set(stored.outcomes) == {Outcome.MISS}
        assert client.match(opened.namespace_id, keys).matched == 0


def test_in_the_child_of_a_fork_a_stage_of_the_parents_is_nothing(client, spec):
    opened = client.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, 2)
    with client.stage(opened.namespace_id, 2) as staged:
        write(staged, keys)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
            except Exception:  # noqa: BLE001  strict: whatever it raises, it stored nothing
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert client.match(opened.namespace_id, keys).matched == 0
        assert client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged)).outcomes == (Outcome.HIT,) * 2


def test_asyncio_stages_too(daemon, spec):
    async def work() -> None:
        async with AsyncClient(daemon.socket, OPTIONS) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 3)
            with await client.stage(opened.namespace_id, 3) as staged:
                write(staged, keys)
                stored = await client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged))
            assert stored.outcomes == (Outcome.HIT,) * 3
            got = await client.get(opened.namespace_id, keys)
            assert [bytes(data) for data in got.payloads] == [payload(opened.layout, key) for key in keys]

    asyncio.run(work())


@pytest.mark.parametrize("turns", range(6))
def test_a_stage_or_put_that_is_cancelled_gives_every_place_back(daemon, watcher, spec, turns):
    before = at_rest(watcher)

    async def cancel(work: asyncio.Task[object]) -> None:
        """After so many turns of the loop: before it is sent, under way, or answered."""
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})

    async def work() -> None:
        async with AsyncClient(daemon.socket, OPTIONS) as client:
            opened = await client.open_namespace(spec)
            keys, _ = chain(opened.namespace_id, 2)
            staging = asyncio.create_task(client.stage(opened.namespace_id, 3))
            await cancel(staging)
            if not staging.cancelled():
                staging.result().give_back()
            await asyncio.to_thread(until, lambda: rights(watcher) == before)
            with await client.stage(opened.namespace_id, 3) as staged:
                write(staged, keys)
                await cancel(
                    asyncio.create_task(client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), staged)))
                )
                assert len(staged) in (0, 3)
            await asyncio.to_thread(until, lambda: rights(watcher) == (before[0], before[1] + idle(client)))

    asyncio.run(work())
