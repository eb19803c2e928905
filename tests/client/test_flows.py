"""Flows driven by hand: what they ask of a driver, and what they give back. No I/O."""

from __future__ import annotations

import pytest

from kvstore.client.flows import Flows
from kvstore.client.options import ClientOptions
from kvstore.client.state import Backoff, ClientState
from kvstore.client.steps import Call
from kvstore.core.clock import ManualClock
from kvstore.core.errors import DeadlineExceeded
from kvstore.core.types import BlockKey, JobId, NamespaceId, Outcome, Reason
from kvstore.v1 import cache_pb2, leases_pb2
from tests.client.harness import small_spec
from tests.client.test_state import DONE, PENDING

NAMESPACE = NamespaceId(bytes(32))
KEYS = [BlockKey(bytes([7]) * 32)]


class Link:
    """A living link that keeps what is posted."""

    pushes, closed, generation = True, False, 0

    def __init__(self):
        self.posted = []

    def post(self, method, payload):
        self.posted.append((method.rpartition("/")[2], leases_pb2.ReleaseLeaseRequest.FromString(payload)))


@pytest.fixture
def flows():
    made = Flows("nowhere", ClientOptions(strict=True, lease_ttl_ms=8000), ManualClock())
    made.state.connected(b"boot")
    made.link, made.generation = Link(), 0
    return made


def answer(flow, reply):
    """Answer the step that a flow waits at; what it returns."""
    with pytest.raises(StopIteration) as end:
        flow.send(reply.SerializeToString())
    return end.value.value


def at_once(flow):
    """What a flow returns that asks for nothing."""
    with pytest.raises(StopIteration) as end:
        next(flow)
    return end.value.value


def granted(flows, ttl_ms=8000):
    flow = flows.gets.take_lease()
    step = next(flow)
    assert (type(step), step.method) == (Call, "kvstore.v1.Leases/GrantLease")
    return answer(flow, leases_pb2.GrantLeaseResponse(lease_id=5, ttl_ms=ttl_ms))


def test_a_settled_lease_is_used_again_and_renewed_at_a_quarter_of_its_time(flows):
    lease = granted(flows)
    assert (lease.ttl_s, lease.renewed) == (8.0, flows.clock.now())
    flows.gets.give_back(lease, NAMESPACE, KEYS, settled=True)
    assert [(name, len(said.keys)) for name, said in flows.link.posted] == [("ReleaseLease", 32)]
    assert at_once(flows.gets.take_lease()) is lease
    flows.gets.give_back(lease, NAMESPACE, (), settled=True)
    assert len(flows.link.posted) == 1, "nothing is released where nothing is pinned"
    flows.clock.advance(2.0)
    flow = flows.gets.take_lease()
    assert next(flow).method == "kvstore.v1.Leases/RenewLease"
    assert answer(flow, leases_pb2.RenewLeaseResponse(ttl_ms=4000)) is lease
    assert (lease.ttl_s, lease.renewed) == (4.0, flows.clock.now())


def test_a_lease_that_may_be_given_more_is_ended_whole(flows):
    lease = granted(flows)
    flows.gets.give_back(lease, NAMESPACE, KEYS, settled=False)
    assert [(name, said.lease_id, said.keys) for name, said in flows.link.posted] == [("ReleaseLease", 5, b"")]
    granted(flows)


def test_views_that_never_came_give_their_lease_back(flows):
    spec = small_spec()
    known = flows.operations.open_namespace(spec, "", None)
    known.fallback()
    lease = granted(flows)
    flows.gets.give_back(lease, NAMESPACE, (), settled=True)
    flow = flows.gets.open_views(spec.namespace_id, KEYS, 0)
    assert next(flow).method == "kvstore.v1.Cache/Fetch"
    with pytest.raises(DeadlineExceeded):
        flow.throw(DeadlineExceeded("no answer"))
    assert [(name, said.keys) for name, said in flows.link.posted] == [("ReleaseLease", b"")]


def test_where_ends_are_not_pushed_the_job_is_asked_for(flows):
    flows.link.pushes = False
    flow = flows.wait_job(JobId(7), 250)
    asked = cache_pb2.WaitJobRequest.FromString(next(flow).payload)
    assert (asked.job_id, asked.timeout_ms) == (7, 250)
    reply = cache_pb2.FetchResponse(job_id=7, outcomes=[Outcome.HIT], reasons=[Reason.NONE])
    assert answer(flow, reply).outcomes == (Outcome.HIT,)


def test_a_put_asks_for_no_connection_where_there_is_one(flows):
    assert at_once(flows.puts.claim(NAMESPACE, 0, {})) == ([], None)


def test_what_a_parent_heard_is_not_its_childs():
    state = ClientState(Backoff())
    state.connected(b"boot")
    state.job_done(JobId(1), DONE)
    state.forked()
    state.job_began(JobId(1), PENDING)
    assert state.take_finished() == []
