"""Jobs end, forks begin anew, and no foreign error comes out."""

from __future__ import annotations

import contextlib
import os

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Area, Outcome, Target
from kvstore.v1 import admin_pb2
from tests.client.harness import ask, blocks_of, chain, payload, until

HIT, MISS = Outcome.HIT, Outcome.MISS


# ------------------------------------------------------------ jobs end


def test_jobs_of_a_daemon_that_died_end_as_misses(ssd_daemon, spec):
    with Client(ssd_daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 4)
        job = client.flows.state
        pending = job_of(client, opened, keys)
        ssd_daemon.kill()
        ended = []
        until(lambda: ended.extend(client.poll()) or ended)
        assert [done.job_id for done in ended] == [pending]
        assert set(ended[0].result.outcomes) == {MISS}
        assert job.pending_jobs() == []


def job_of(client, opened, keys):
    """A job under way of which the end was not seen: as if its push had been lost."""
    client.put(opened.namespace_id, blocks_of(opened.layout, keys))
    lease = client.grant_lease("job", 60_000)
    client.flows.job_done = lambda *_: None
    fetched = client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease)
    assert set(fetched.outcomes) == {Outcome.PENDING}
    return fetched.job_id


def test_waiting_for_no_time_sees_the_end(daemon, spec):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 4)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        lease = client.grant_lease("job", 60_000)
        fetched = client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease)
        until(lambda: client.wait_job(fetched.job_id, 0).outcomes == (HIT,) * 4)


# ------------------------------------------------------------ fork


def in_child(work):
    """Run ``work`` in a forked child; its exit status, 0 if it returned True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("first", ["used in the child", "closed in the child"])
def test_a_forked_child_has_a_session_of_its_own_and_leaves_the_parents_alone(daemon, spec, first):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, name="parent")) as client:
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 4)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        lease = client.grant_lease("parent's", 60_000)
        token = client.connection()[0].welcome.token

        def work():
            if first.startswith("closed"):
                client.close()
                return True
            right = [payload(opened.layout, key) for key in keys]
            got = client.get(opened.namespace_id, keys)
            mine = client.connection()[0].welcome.token
            return [bytes(p) for p in got.payloads] == right and mine != token

        assert in_child(work) == 0
        client.renew_lease(lease)
        assert client.connection()[0].welcome.token == token


def test_the_session_of_a_parent_ends_though_its_child_lives(daemon, watcher):
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        client = Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, name="dies first"))
        client.grant_lease("x", 600_000)
        grandchild = os.fork()
        if grandchild == 0:
            os.close(done[1])
            os.read(done[0], 1)
            os._exit(0)
        os.write(ready[1], b"r")
        os.kill(os.getpid(), 9)
    os.read(ready[0], 1)
    os.waitpid(pid, 0)

    def sessions():
        return {s.owner for s in ask(watcher, "ListLeases", admin_pb2.ListLeasesResponse).sessions}

    until(lambda: "dies first" not in sessions())
    for end in (*ready, *done):
        os.close(end)


# ------------------------------------------------------------ the caller's own mistakes


@pytest.mark.parametrize(
    "call",
    [
        lambda c, n, k: c.get(n, k, wait_ms=-1),
        lambda c, n, k: c.get(n, k, wait_ms=2**31),
        lambda c, n, k: c.reserve(n, 1, count=-1),
        lambda c, n, k: c.match(n, ["not bytes"]),
        lambda c, n, k: c.match(n, [None]),
        lambda c, n, k: c.grant_lease(7, 1000),
        lambda c, n, k: c.grant_lease("x", "soon"),
        lambda c, n, k: c.wait_job(2**80, 0),
        lambda c, n, k: c.commit(n, [3]),
        lambda c, n, k: c.get("x", k),
        lambda c, n, k: c.get(None, k),
        lambda c, n, k: c.put(n, None),
        lambda c, n, k: c.abort(["a"]),
        lambda c, n, k: c.fetch(n, k, 3, lease_id=c.grant_lease("x", 1000), layers=(1,)),
        lambda c, n, k: c.fetch(n, k, "HOST", lease_id=c.grant_lease("x", 1000)),
        lambda c, n, k: c.open_namespace(None),
        lambda c, n, k: c.release("x"),
        lambda c, n, k: c.hold(1.5, n, k),
        lambda c, n, k: c.flush("now"),
        lambda c, n, k: c.prefetch(n, k, None),
    ],
)
def test_no_foreign_error_comes_out(daemon, spec, call):
    with Client(daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        namespace = client.open_namespace(spec).namespace_id
        keys, _ = chain(namespace, 1)
        with contextlib.suppress(InvalidArgument):
            call(client, namespace, keys)
        assert client.match(namespace, keys).matched == 0
        assert client.memory(Area.HOST).readonly
