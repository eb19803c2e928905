"""The client's memory: generations, jobs in any order, backoff, failures."""

from __future__ import annotations

import pytest

from kvstore.cache import FetchResult
from kvstore.client.flows import Flows
from kvstore.client.options import ClientOptions
from kvstore.client.state import Backoff, ClientState, outward
from kvstore.core.clock import ManualClock
from kvstore.core.errors import InvalidArgument, Unavailable, UnknownJob, UnknownLease, UnknownReservation
from kvstore.core.types import JobId, LeaseId, Outcome, Reason, ReservationId

PENDING = FetchResult((Outcome.PENDING,), (Reason.NONE,), (None,))
DONE = FetchResult((Outcome.HIT,), (Reason.NONE,), (None,))


@pytest.fixture
def state():
    made = ClientState(Backoff())
    made.connected(b"first boot")
    return made


def test_ids_belong_to_their_connection(state):
    lease, reservation, job = (outward(7, state.generation) for _ in range(3))
    assert (state.lease(LeaseId(lease)), state.job(JobId(job))) == (7, 7)
    assert state.reservations([ReservationId(reservation)]) == [7]
    assert state.connected(b"second boot")
    with pytest.raises(UnknownLease):
        state.lease(LeaseId(lease))
    with pytest.raises(UnknownJob):
        state.job(JobId(job))
    with pytest.raises(UnknownReservation):
        state.reservations([ReservationId(outward(8, state.generation)), ReservationId(reservation)])
    assert state.present_reservations([ReservationId(reservation), ReservationId(outward(8, 1))]) == [8]
    assert outward(7, state.generation) not in (lease, 7)


def test_id_zero_is_nothing(state):
    assert outward(0, 5) == 0
    with pytest.raises(UnknownLease):
        state.lease(LeaseId(0))


def test_the_same_boot_is_not_fresh(state):
    assert not state.connected(b"first boot")
    assert state.generation == 1


def test_the_end_of_a_job_may_overtake_its_beginning(state):
    state.job_done(JobId(1), DONE)
    assert state.take_finished() == []
    state.job_began(JobId(1), PENDING)
    assert state.take_finished() == [(1, DONE)]
    assert state.take_finished() == []


def test_a_claimed_job_is_not_polled(state):
    state.job_began(JobId(1), PENDING)
    state.job_began(JobId(2), PENDING)
    assert state.claim(JobId(1)) is PENDING
    state.job_done(JobId(1), DONE)
    state.job_done(JobId(2), DONE)
    assert [job for job, _ in state.take_finished()] == [2]
    assert state.is_finished(JobId(1))
    assert state.unclaim(JobId(1)) is DONE
    assert state.claim(JobId(1)) is None
    assert state.unclaim(JobId(1)) is None


def test_jobs_of_an_earlier_connection_are_lost(state):
    state.job_began(JobId(1), PENDING)
    assert state.pending_jobs() == [1]
    state.connected(b"second boot")
    assert state.pending_jobs() == []
    assert state.lost_jobs() == [(1, 1)]
    assert state.lost_jobs() == []


def test_what_nobody_polls_is_bounded(state):
    for number in range(1, 10_000):
        state.job_began(JobId(number), PENDING)
        state.job_done(JobId(number), DONE)
    assert len(state.take_finished()) == 4096


def test_pauses_double_up_to_the_last(state):
    pauses = [Backoff(first_s=1.0, last_s=8.0).pause_s(failures) for failures in (1, 2, 3, 4, 5, 100)]
    for pause, least in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert least <= pause <= 1.25 * least


def test_no_attempt_inside_a_pause(state):
    until = state.connect_failed(100.0)
    assert state.seconds_to_attempt(100.0) == until - 100.0 > 0
    assert state.seconds_to_attempt(until) == 0
    state.connected(b"first boot")
    assert state.seconds_to_attempt(100.0) == 0


def test_failures_are_counted_and_logged_sparingly(caplog):
    flows = Flows("nowhere", ClientOptions(), ManualClock())
    for _ in range(1000):
        flows.note("kvstore.v1.Cache/Match", Unavailable("gone"))
    flows.note("kvstore.v1.Cache/Match", InvalidArgument("a", 1, "2"))
    assert flows.state.failures() == {"Match:UNAVAILABLE": 1000, "Match:INVALID_ARGUMENT": 1}
    assert len([record for record in caplog.records if record.name == "kvstore.client"]) == 3 + 1 + 1
