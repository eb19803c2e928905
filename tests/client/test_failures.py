"""kill -9 of a client and of the daemon: what was theirs is gone, nothing half-written is seen, and all goes on."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys

import pytest

from kvstore.cache import CommitEntry
from kvstore.client import AsyncClient, Backoff, Client, ClientOptions, Control
from kvstore.core.errors import InvalidArgument, NamespaceMismatch, Unavailable, UnknownLease, UnknownReservation
from kvstore.core.types import Area, LeaseId, Outcome, Reason, Target, Tier
from kvstore.v1 import admin_pb2
from tests.client.harness import DaemonProcess, blocks_of, chain, leftovers, payload, small_spec, until

STRICT = ClientOptions(strict=True, buffer_bytes=1 << 20)
EAGER = Backoff(first_s=0.01, last_s=0.05)
_salts = itertools.count()


@pytest.fixture
def spec():
    return small_spec(salt=f"failures {next(_salts)}".encode())


@pytest.fixture
def watcher(daemon):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, name="watcher")) as client:
        yield client


def admin(client, name, request, kind):
    return kind.FromString(client.connection()[0].call(f"kvstore.v1.Admin/{name}", request.SerializeToString(), 10.0))


def status(client):
    return admin(client, "Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)


def owners(client):
    reply = admin(client, "ListLeases", admin_pb2.ListLeasesRequest(), admin_pb2.ListLeasesResponse)
    return {session.owner for session in reply.sessions} | {lease.owner for lease in reply.leases}


VICTIM = """
import sys
from kvstore.client import Client, ClientOptions
from kvstore.core.types import Area, Target, Tier
from tests.client.harness import blocks_of, chain, small_spec
socket, salt, moment = sys.argv[1:]
client = Client(socket, ClientOptions(strict=True, buffer_bytes=1 << 20, name="victim"))
spec = small_spec(salt=salt.encode())
opened = client.open_namespace(spec)
keys, _ = chain(opened.namespace_id, 4)
assert client.put(opened.namespace_id, blocks_of(opened.layout, keys[:2])).outcomes == (1, 1)
lease = client.grant_lease("victim's", 600_000)
if moment == "lease":
    assert client.hold(lease, opened.namespace_id, keys[:2]) == (True, True)
if moment == "read":
    assert client.fetch(opened.namespace_id, keys[:2], Target.IN_PLACE, lease_id=lease).outcomes == (1, 1)
    assert client.fetch(opened.namespace_id, keys[:2], Target.BUFFER, lease_id=lease, wait_ms=5000).outcomes == (1, 1)
if moment == "write":
    places = client.reserve(opened.namespace_id, Tier.HOST, keys=keys[2:]).places
    client.memory(Area.BUFFER)[places[0].offset] = 7
    client.reserve(opened.namespace_id, Tier.DEVICE, count=3)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("moment", ["lease", "read", "write"])
def test_a_killed_client_leaves_nothing(daemon, watcher, spec, moment):
    before, files = status(watcher), leftovers()
    opened = watcher.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, 4)
    child = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(daemon.socket), spec.salt.decode(), moment],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "there\n"
        assert "victim" in owners(watcher)
        if moment != "write":
            assert watcher.remove(opened.namespace_id, keys[:2]) == (Outcome.BUSY, Outcome.BUSY)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    until(lambda: "victim" not in owners(watcher))
    after = status(watcher)
    assert (after.leases, after.reservations, after.sessions) == (before.leases, before.reservations, before.sessions)
    assert [t.reserved_bytes for t in after.tiers] == [t.reserved_bytes for t in before.tiers]
    assert watcher.match(opened.namespace_id, keys).matched == 2
    until(lambda: Outcome.BUSY not in watcher.remove(opened.namespace_id, keys))
    assert watcher.match(opened.namespace_id, keys).matched == 0
    assert leftovers() == files


REMOTE_VICTIM = """
import sys
from kvstore.client import Client, ClientOptions
from kvstore.client.payloads import PutPlan
from kvstore.client.streaming import write_messages
from tests.client.harness import blocks_of, chain, small_spec
address, salt = sys.argv[1:]
client = Client(address, ClientOptions(strict=True, name="far victim", remote_ttl_ms=1000))
opened = client.open_namespace(small_spec(salt=salt.encode()))
keys, _ = chain(opened.namespace_id, 3)
plan = PutPlan.of(opened.layout, blocks_of(opened.layout, keys))
def half():
    for number, message in enumerate(write_messages(opened.namespace_id, plan, plan.parts[0])):
        if number == 2:
            print("there", flush=True)
            sys.stdin.read()
        yield message
client.connection()[0].upload("kvstore.v1.Cache/Write", half(), 60.0)
"""


def test_a_killed_remote_client_leaves_nothing(daemon, watcher, spec):
    before = status(watcher)
    opened = watcher.open_namespace(spec)
    keys, _ = chain(opened.namespace_id, 3)
    child = subprocess.Popen(
        [sys.executable, "-c", REMOTE_VICTIM, f"grpc://127.0.0.1:{daemon.port}", spec.salt.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "there\n"
        until(lambda: "write stream" in owners(watcher))
        assert watcher.match(opened.namespace_id, keys).matched == 0
        child.kill()
    until(lambda: not {"far victim", "write stream"} & owners(watcher))
    assert status(watcher).reservations == before.reservations
    assert watcher.match(opened.namespace_id, keys).matched == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_closed_remote_client_is_gone_at_once(daemon, watcher, kind):
    address = f"grpc://127.0.0.1:{daemon.port}"
    options = ClientOptions(strict=True, name=f"far {kind}", remote_ttl_ms=600_000)

    async def run():
        async with AsyncClient(address, options) as client:
            await client.grant_lease(options.name, 600_000)
            return status(watcher)

    if kind == "async":
        during = asyncio.run(run())
    else:
        with Client(address, options) as client:
            client.grant_lease(options.name, 600_000)
            during = status(watcher)
    after = status(watcher)
    assert (after.sessions, after.leases) == (during.sessions - 1, during.leases - 1)


def test_closing_a_remote_client_of_a_daemon_that_is_gone_is_quiet(own_daemon_tcp):
    client = Client(f"grpc://127.0.0.1:{own_daemon_tcp.port}", ClientOptions(strict=True))
    own_daemon_tcp.kill()
    client.close()
    client.close()
    assert not client.connected


@pytest.fixture
def own_daemon_tcp(tmp_path):
    process = DaemonProcess(tmp_path, "--listen=127.0.0.1:0")
    process.start()
    yield process
    process.stop()


@pytest.fixture
def own_daemon(tmp_path):
    process = DaemonProcess(tmp_path, "--ssd=64MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    process.start()
    yield process
    process.stop()


@pytest.mark.parametrize("control", list(Control))
def test_a_killed_daemon_is_a_miss_then_hits_again(own_daemon, spec, control):
    files = leftovers()
    options = ClientOptions(buffer_bytes=1 << 20, control=control, backoff=EAGER)
    with Client(own_daemon.socket, options) as client:
        opened = client.open_namespace(spec)
        namespace = opened.namespace_id
        keys, _ = chain(namespace, 4)
        assert client.put(namespace, blocks_of(opened.layout, keys)).outcomes == (Outcome.HIT,) * 4
        client.flush()
        lease = client.grant_lease("old", 60_000)
        held = client.reserve(namespace, Tier.HOST, keys=[bytes([5]) * 32])
        assert held.outcomes == (Outcome.PENDING,)

        own_daemon.kill()
        assert client.match(namespace, keys).matched == 0
        assert client.get(namespace, keys).outcomes == (Outcome.MISS,) * 4
        assert client.put(namespace, blocks_of(opened.layout, keys)).outcomes == (Outcome.MISS,) * 4
        assert client.reserve(namespace, Tier.DEVICE, count=2).busy.reason is Reason.TIER_UNAVAILABLE
        assert client.grant_lease("new", 1000) == LeaseId(0)
        assert client.failures()

        own_daemon.start()
        until(lambda: client.match(namespace, keys).matched == 4)
        assert client.generation >= 1
        got = client.get(namespace, keys)
        assert [bytes(part) for part in got.payloads] == [payload(opened.layout, key) for key in keys]
        assert client.fetch(namespace, keys, Target.IN_PLACE, lease_id=lease).outcomes == (Outcome.MISS,) * 4
        entry = CommitEntry(held.reservation_ids[0], bytes([5]) * 32, bytes(32))
        assert client.commit(namespace, [entry]).outcomes == (Outcome.MISS,)
    own_daemon.stop()
    assert leftovers() == files


def test_ids_of_the_old_boot_raise_when_strict(own_daemon, spec):
    options = ClientOptions(strict=True, buffer_bytes=1 << 20, backoff=EAGER)
    with Client(own_daemon.socket, options) as client:
        namespace = client.open_namespace(spec).namespace_id
        keys, _ = chain(namespace, 1)
        lease = client.grant_lease("old", 60_000)
        old_boot, old_view = client.state.boot_id, client.memory(Area.HOST)
        held = client.reserve(namespace, Tier.HOST, keys=keys)
        own_daemon.kill()
        with pytest.raises(Unavailable):
            client.grant_lease("new", 1000)
        own_daemon.start()
        # Not connected again yet.
        assert client.abort(held.reservation_ids) == 0
        assert client.wait_ready(20)
        assert client.state.boot_id != old_boot
        with pytest.raises(UnknownLease):
            client.renew_lease(lease)
        with pytest.raises(Unavailable):
            client.memory_at(client.generation - 1)
        # The daemon counts from 1 again: the id alone would name the new session's first lease.
        fresh = client.grant_lease("fresh", 60_000)
        assert fresh != lease
        with pytest.raises(UnknownReservation):
            client.commit(namespace, [CommitEntry(held.reservation_ids[0], keys[0], bytes(32))])
        assert client.abort(held.reservation_ids) == 0
        layout = client.open_namespace(spec).layout
        assert client.put(namespace, blocks_of(layout, keys)).outcomes == (Outcome.HIT,)
        started = client.fetch(namespace, keys, Target.BUFFER, lease_id=fresh)
        assert client.wait_job(started.job_id, 10_000).outcomes == (Outcome.HIT,)
        assert old_view[0] in range(256)


def test_namespaces_are_open_again_though_nothing_of_them_is_on_disk(tmp_path, spec):
    process = DaemonProcess(tmp_path)
    process.start()
    with Client(process.socket, ClientOptions(strict=True, buffer_bytes=1 << 20, backoff=EAGER)) as client:
        namespace = client.open_namespace(spec, name="mine").namespace_id
        keys, _ = chain(namespace, 1)
        process.kill()
        process.start()
        assert client.wait_ready(20)
        assert client.match(namespace, keys).reason is Reason.NEVER_STORED
        with pytest.raises(NamespaceMismatch):
            client.open_namespace(small_spec(dtype="bfloat16"), name="mine")
    process.stop()


def test_not_strict_still_raises_for_the_callers_own_errors_and_no_other(daemon, spec):
    with Client(daemon.socket, ClientOptions(buffer_bytes=1 << 20)) as client:
        namespace = client.open_namespace(spec, name=f"name of {spec.salt}").namespace_id
        keys, _ = chain(namespace, 1)
        with pytest.raises(InvalidArgument):
            client.match(namespace, [bytes(31)])
        with pytest.raises(NamespaceMismatch):
            client.open_namespace(small_spec(dtype="bfloat16"), name=f"name of {spec.salt}")
        assert client.fetch(namespace, keys, Target.IN_PLACE, lease_id=LeaseId(77)).outcomes == (Outcome.MISS,)
        client.renew_lease(LeaseId(77))
        assert client.commit(namespace, [CommitEntry(77, keys[0], bytes(32))]).reasons == (Reason.DROPPED,)
        assert client.wait_job(77, 0).outcomes == ()
        assert client.failures() == {
            "Fetch:UNKNOWN_LEASE": 1,
            "RenewLease:UNKNOWN_LEASE": 1,
            "Commit:UNKNOWN_RESERVATION": 1,
            "WaitJob:UNKNOWN_JOB": 1,
        }


def test_a_client_may_start_before_its_daemon(tmp_path, spec):
    process = DaemonProcess(tmp_path)
    with Client(process.socket, ClientOptions(buffer_bytes=1 << 20, backoff=EAGER)) as client:
        namespace = client.open_namespace(spec).namespace_id
        keys, _ = chain(namespace, 1)
        assert client.match(namespace, keys).reason is Reason.TIER_UNAVAILABLE
        process.start()
        assert client.wait_ready(20)
        assert client.match(namespace, keys).reason is Reason.NEVER_STORED
    process.stop()


def test_no_daemon_raises_when_strict(tmp_path):
    with pytest.raises(Unavailable) as caught:
        Client(tmp_path / "none.sock", STRICT)
    assert "start kvstored" in str(caught.value)
