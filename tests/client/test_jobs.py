"""Jobs: submit returns at once, the descriptor tells of their end, and each result is handed out once."""

from __future__ import annotations

import itertools
import select
import threading

import pytest

from kvstore.client import Client, ClientOptions, Control
from kvstore.core.types import Outcome, Target
from tests.client.harness import blocks_of, chain, payload, small_spec, until

_salts = itertools.count()


@pytest.fixture(params=list(Control))
def client(request, daemon):
    options = ClientOptions(strict=True, buffer_bytes=1 << 20, control=request.param)
    with Client(daemon.socket, options) as made:
        yield made


@pytest.fixture
def stored(client):
    """A chain in HOST, whose blocks a copy to the buffer takes a job."""
    opened = client.open_namespace(small_spec(salt=f"jobs {next(_salts)}".encode()))
    keys, _ = chain(opened.namespace_id, 4)
    client.put(opened.namespace_id, blocks_of(opened.layout, keys))
    return opened, keys


def submit(client, stored):
    opened, keys = stored
    lease = client.grant_lease("job", 30_000)
    started = client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease)
    for _ in range(100):
        if Outcome.PENDING in started.outcomes:
            break
        # On a busy machine a job may be done before its submission is answered: another one will not.
        client.release(lease, opened.namespace_id, keys)
        started = client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease)
    assert started.outcomes == (Outcome.PENDING,) * 4
    assert started.job_id
    return started


def check(client, stored, result):
    opened, keys = stored
    assert result.outcomes == (Outcome.HIT,) * 4
    for key, place in zip(keys, result.places, strict=True):
        memory = client.memory(place.area)
        got = b"".join(bytes(memory[place.offset + n * place.stride :][: opened.layout.slice_bytes]) for n in range(3))
        assert got == payload(opened.layout, key)


def test_a_job_is_polled(client, stored):
    started = submit(client, stored)
    assert select.select([client.fileno()], [], [], 20.0)[0]
    completions = []
    until(lambda: bool(completions.extend(client.poll()) or completions))
    assert [done.job_id for done in completions] == [started.job_id]
    check(client, stored, completions[0].result)
    assert client.poll() == []


def test_a_job_is_waited_for(client, stored):
    started = submit(client, stored)
    check(client, stored, client.wait_job(started.job_id, 20_000))
    assert client.poll() == []


def test_a_fetch_that_waits_needs_no_job(client, stored):
    opened, keys = stored
    lease = client.grant_lease("wait", 30_000)
    fetched = client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease, wait_ms=20_000)
    check(client, stored, fetched)


def test_a_waiting_thread_does_not_keep_others_from_calling(client, stored):
    started = submit(client, stored)
    results = []
    waiter = threading.Thread(target=lambda: results.append(client.wait_job(started.job_id, 20_000)))
    waiter.start()
    for _ in range(50):
        assert client.match(stored[0].namespace_id, stored[1]).matched == 4
        client.poll()
    waiter.join()
    check(client, stored, results[0])


def test_many_threads_share_one_connection(client, stored):
    opened, keys = stored
    failures = []

    def work(number):
        for length in range(1, 40):
            wanted = keys[: 1 + (number + length) % 4]
            if client.match(opened.namespace_id, wanted).matched != len(wanted):
                failures.append((number, length))
        got = client.get(opened.namespace_id, keys)
        if [bytes(part) for part in got.payloads] != [payload(opened.layout, key) for key in keys]:
            failures.append((number, "bytes"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
