"""The torture tool itself: it runs, and it would find a loss."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvstore.tools.crashtest.daemon import CAP_BYTES, Known, Torture, payload_of
from kvstore.tools.crashtest.events import Event, pack, unpack
from kvstore.tools.crashtest.judge import Verdict
from kvstore.tools.crashtest.main import Tally, run_loop


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_lose_nothing(tmp_path):
    tally, chance = Tally(), random.Random(5)
    for _ in range(10):
        run_loop(str(tmp_path / "ssd"), tally, chance)
    assert tally.good, tally
    assert tally.acks
    assert tally.reads_checked


def test_a_torn_record_is_left_out():
    data = pack(Event.WRITING, [1, 2]) + pack(Event.DURABLE, [1])
    assert unpack(data[:-1]) == [(Event.WRITING, 1), (Event.WRITING, 2)]


def test_what_must_and_may_be_there():
    tally = Tally()
    told = [(Event.READY, 0), (Event.WRITING, 1), (Event.WRITING, 2), (Event.WRITING, 3), (Event.DURABLE, 1)]
    told += [(Event.DURABLE, 2), (Event.DROPPING, 2), (Event.WRITING, 4), (Event.DROPPING, 4), (Event.DROPPED, 4)]
    tally.hear(told)
    assert (tally.must, tally.may, tally.next_seed) == ({1}, {2, 3}, 5)


@pytest.mark.parametrize(
    "verdict",
    [Verdict(lost=[1]), Verdict(corrupt=[1]), Verdict(phantoms=[1]), Verdict(faults=["over the cap"])],
    ids=["lost", "corrupt", "phantom", "fault"],
)
def test_each_breach_counts(verdict):
    tally = Tally()
    tally.take(Verdict(found=[1, 2]))
    assert tally.good
    assert tally.must == {1, 2}
    tally.take(verdict)
    assert not tally.good


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_a_daemon_lose_nothing(tmp_path):
    torture = Torture(tmp_path, 5)
    for _ in range(4):
        torture.run_loop()
    assert torture.tally.good, torture.tally
    assert torture.tally.acks
    assert torture.tally.reads_checked


class OneBlock:
    """A client that answers every get with one payload."""

    def __init__(self, payload):
        self.payload = payload

    def get(self, _namespace, keys):
        return SimpleNamespace(payloads=[self.payload for _ in keys])


KEY = bytes(32)


@pytest.mark.parametrize(
    ("payload", "put_after", "removing", "found"),
    [
        (payload_of(KEY), 0, False, (0, 0, 0)),
        (bytes(len(payload_of(KEY))), 0, False, (1, 0, 0)),
        (None, 0, False, (0, 1, 0)),
        (None, CAP_BYTES // 4 - 1, False, (0, 1, 0)),
        (None, CAP_BYTES // 4, False, (0, 0, 1)),
        (None, 0, True, (0, 0, 0)),
    ],
    ids=["right", "wrong", "lost", "lost later", "evicted", "removed"],
)
def test_a_block_after_a_kill(tmp_path, monkeypatch, payload, put_after, removing, found):
    torture = Torture(tmp_path, 1)
    monkeypatch.setattr(torture, "_check_directory", lambda: None)
    torture.known.put([KEY])
    torture.known.put_bytes += put_after
    torture.known.removing |= {KEY} if removing else set()
    torture._judge(OneBlock(payload), None)
    tally = torture.tally
    assert (tally.corrupt, tally.lost, tally.evicted) == found
    assert tally.good == (not any(found[:2]))
    assert (KEY in torture.known.durable) == (payload is not None)


def test_blocks_behind_a_removed_one_may_be_gone():
    known = Known(child={b"1": b"2", b"2": b"3", b"4": b"5"})
    known.remove([b"2"])
    assert known.removing == {b"2", b"3"}


def test_a_directory_over_the_cap_is_a_fault():
    tally = Tally()
    tally.measure(10, cap_bytes=10)
    assert (tally.good, tally.du_bytes_max, tally.du_samples) == (True, 10, 1)
    tally.measure(11, cap_bytes=10)
    assert not tally.good
