"""The judge of a killed daemon: each block that is gone is explained by what the daemon told, or it is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.core.errors import Unavailable
from kvstore.core.types import Outcome, Reason
from kvstore.tools.crashtest import daemon
from kvstore.tools.crashtest.daemon import Torture
from kvstore.tools.crashtest.known import keys_of, payload_of

KEY, OTHER = keys_of(7, 2)
WRONG = bytes(len(payload_of(KEY)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_a_daemon_lose_nothing(tmp_path):
    torture = Torture(tmp_path, 5)
    for _ in range(4):
        torture.run_loop()
    torture.close()
    assert torture.tally.good, torture.tally
    assert torture.tally.acks
    assert torture.tally.reads_checked
    assert torture.tally.evicted


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["acknowledge_early", "forget_records", "take_memory_for_disk", "skip_in_recovery"])
def test_a_daemon_that_breaks_its_word_is_found_out(tmp_path, way):
    # This seed's policy leaves blocks in memory for long.
    torture = Torture(tmp_path, 75, [sys.executable, str(Path(__file__).with_name("broken_kvstored.py")), way])
    for _ in range(12):
        torture.run_loop()
        if not torture.tally.good:
            break
    torture.close()
    assert torture.tally.lost
    assert not torture.tally.good


class OneBlock:
    """A client that answers every get with one payload; without one, MISS for a reason."""

    def __init__(self, payload, reason=Reason.NEVER_STORED):
        self._outcome = Outcome.MISS if payload is None else Outcome.HIT
        self._answer = (payload, Reason.NONE if payload is not None else reason)

    def get(self, _namespace, keys):
        payload, reason = self._answer
        columns = ([value] * len(keys) for value in (payload, self._outcome, reason))
        return SimpleNamespace(**dict(zip(("payloads", "outcomes", "reasons"), columns, strict=True)))


@pytest.fixture
def torture(tmp_path):
    return Torture(tmp_path, 1)


def tell(torture, *lines):
    """Write lines of the trace into the daemon's log."""
    with torture.trace.path.open("a") as log:
        log.writelines(f"2026-01-01 00:00:00,000 DEBUG kvstore.store.trace: {line}\n" for line in lines)


def judge(torture, payload, *, named, told=(), client=None):
    """A life that ends with these lines, and what the next one answers."""
    tell(torture, *told)
    torture.trace.end_of_life()
    torture._judge(client or OneBlock(payload), None, frozenset([KEY] if named else []), torture.trace.end)
    return torture.tally


EVICTED = f"dropped SSD {KEY.hex()} EVICTED"
REMOVED = f"gone {KEY.hex()} REMOVED"


@pytest.mark.parametrize(
    ("payload", "named", "told", "found"),
    [
        (payload_of(KEY), True, (), {}),
        (WRONG, True, (), {"corrupt": 1}),
        (payload_of(KEY), False, (), {"phantoms": 1}),
        (None, False, (), {"lost": 1}),
        (None, True, (), {"lost": 1}),
        (None, False, (EVICTED,), {"evicted": 1}),
        (None, False, (f"{EVICTED} [request 4-4]",), {"evicted": 1}),
        (None, True, (EVICTED,), {"lost": 1}),
        (payload_of(KEY), True, (EVICTED,), {"drops_undone": 1}),
        (None, False, (REMOVED,), {"lost": 1}),
        (None, False, (f"dropped SSD {KEY.hex()} DROPPED",), {"lost": 1}),
        (None, False, (f"dropped SSD {KEY.hex()} QUARANTINED",), {"lost": 1}),
        (None, False, (f"dropped HOST {KEY.hex()} EVICTED",), {"lost": 1}),
        (None, False, (f"gone {KEY.hex()} EVICTED",), {"evicted": 1}),
        (None, False, (f"dropped SSD {OTHER.hex()} EVICTED",), {"lost": 1}),
        (None, False, (f"dropped SSD {KEY.hex()} EVICT",), {"lost": 1}),
        (None, False, (f"stored SSD {KEY.hex()}",), {"lost": 1}),
    ],
    ids=[
        "right", "wrong", "phantom", "lost", "named and lost", "evicted", "evicted, asked",
        "named, so not evicted", "eviction undone",
        "not asked", "dropped", "quarantined", "from HOST only", "gone", "another's", "torn line", "stored",
    ],
)  # fmt: skip
def test_a_durable_block_after_a_kill(torture, payload, named, told, found):
    torture.known.witness([KEY], 0)
    tally = judge(torture, payload, named=named, told=told)
    counted = ("corrupt", "phantoms", "lost", "evicted", "removed", "drops_undone")
    assert {name: getattr(tally, name) for name in counted if getattr(tally, name)} == found
    assert tally.good == (not {"corrupt", "phantoms", "lost"} & found.keys())
    assert (KEY in torture.known.durable) == (payload is not None)


def test_a_removal_explains_a_block_as_often_as_it_was_asked_for(torture):
    torture.known.ask([KEY])
    torture.known.witness([KEY], 0)
    assert judge(torture, None, named=False, told=(REMOVED,)).removed == 1
    torture.known.witness([KEY], torture.trace.end)
    tally = judge(torture, None, named=False, told=(REMOVED,))
    assert (tally.removed, tally.lost) == (1, 1)


def test_a_block_that_was_removed_on_its_way_to_disk_is_explained(torture):
    torture.known.ask([KEY])
    torture.known.witness([KEY], 0)
    assert judge(torture, None, named=False, told=(f"gone {KEY.hex()} REMOVED",)).removed == 1


def test_a_drop_before_the_acknowledgement_explains_nothing(torture):
    tell(torture, EVICTED)
    torture.known.witness([KEY], torture.trace.end)
    assert judge(torture, None, named=False).lost == 1


def test_a_block_that_was_there_after_a_kill_must_have_a_new_reason_to_go(torture):
    torture.known.witness([KEY], 0)
    assert judge(torture, payload_of(KEY), named=True, told=(EVICTED,)).drops_undone == 1
    assert judge(torture, None, named=False).lost == 1


def test_a_block_that_the_new_daemon_evicts_before_it_is_asked_is_explained(torture):
    torture.known.witness([KEY], 0)
    torture.trace.end_of_life()
    born = torture.trace.end
    tell(torture, EVICTED)
    torture._judge(OneBlock(None), None, frozenset([KEY]), born)
    assert (torture.tally.evicted, torture.tally.lost) == (1, 0)


def test_what_the_records_name_must_be_served_whoever_was_told_of_it(torture):
    assert judge(torture, None, named=True).lost == 1


def test_a_block_that_can_not_be_read_is_asked_for_again_and_then_told(torture, monkeypatch):
    monkeypatch.setattr(daemon, "RETRY_SECONDS", 0.0)
    torture.known.witness([KEY], 0)
    tally = judge(torture, None, named=True, client=OneBlock(None, Reason.TIER_UNAVAILABLE))
    assert any("can not be read: MISS TIER_UNAVAILABLE" in fault for fault in tally.faults)


def test_a_line_that_the_kill_cut_does_not_spoil_the_next(torture):
    torture.known.witness([KEY, OTHER], 0)
    with torture.trace.path.open("a") as log:
        log.write(f"2026-01-01 00:00:00,000 DEBUG kvstore.store.trace: dropped SSD {OTHER.hex()[:20]}")
    torture.trace.end_of_life()
    tell(torture, EVICTED)
    torture.trace.read()
    assert torture.trace.drops.keys() == {KEY}


def test_errors_in_the_log_are_kept(torture):
    torture.trace.path.write_text("2026-01-01 00:00:00,000 ERROR kvstore.ssd: 3 blocks were not committed\nno end")
    torture.trace.read()
    assert [line.partition(" ERROR ")[2] for line in torture.trace.errors] == [
        "kvstore.ssd: 3 blocks were not committed"
    ]


@pytest.mark.parametrize(
    ("orderly", "told", "expected"),
    [
        (True, "drained: 1 blocks written, 0 not", True),
        (True, "a flush was not complete: 1 blocks are not on SSD, of 1 that were not", False),
        (False, "drained: 1 blocks written, 0 not", False),
    ],
    ids=["in order", "in order, not complete", "killed"],
)
def test_an_orderly_end_makes_durable_what_was_in_memory(torture, monkeypatch, orderly, told, expected):
    monkeypatch.setattr(daemon, "STOP_SHARE", float(orderly))
    ends = []
    torture.daemon.stop, torture.daemon.kill = (lambda: ends.append("stop")), (lambda: ends.append("kill"))
    torture.known.soft[KEY] = 7
    with torture.trace.path.open("a") as log:
        log.write(f"2026-01-01 00:00:00,000 WARNING kvstore.store.verbs.maintenance: {told}\n")
    torture._end([])
    assert ends == ["stop" if orderly else "kill"]
    assert torture.known.durable == ({KEY: 7} if expected else {})
    assert not torture.known.soft


class Flushing:
    """A client whose flush is answered or refused."""

    def __init__(self, error=None):
        self._error = error

    def flush(self):
        if self._error is not None:
            raise self._error


def test_a_flush_makes_durable_what_was_acknowledged_before_it(torture):
    clients = torture._clients()
    torture.known.soft |= {KEY: 3}
    clients._flush(Flushing(Unavailable("not all is durable: 1 blocks are not on SSD")), None, None)
    assert (torture.known.durable, torture.tally.flushes_refused) == ({}, 1)
    clients._flush(Flushing(), None, None)
    assert (torture.known.durable, torture.known.soft, torture.tally.flushes) == ({KEY: 3}, {}, 1)
    with pytest.raises(Unavailable):
        clients._flush(Flushing(Unavailable("the connection is closed")), None, None)
