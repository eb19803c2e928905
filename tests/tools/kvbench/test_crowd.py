"""What ``kvbench crowd`` says of what it measured, and how it ends where clients can not be served."""

from __future__ import annotations

import os

import pytest

from kvstore.core.errors import Unavailable
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.crowd import Crowd, Effort, Round, _pid_behind, run_crowd
from kvstore.tools.kvbench.crowd_report import lowest_share, report


def crowd(clients: int, *calls: int, copies: float = 400.0) -> Crowd:
    """Rounds of one second with as many puts of 1 to n ms, and gets of twice that."""
    rounds = [
        Round(
            1.0,
            puts=[i / 1000 for i in range(1, count // 2 + 1)],
            gets=[i / 500 for i in range(1, count // 2 + 1)],
            misses=0,
            daemon_s=0.1,
            clients_s=0.3,
            copies=copies,
            echoes=1000.0,
        )
        for count in calls
    ]
    return Crowd(clients, rounds)


def test_the_verdict_compares_with_the_best_of_as_many_clients_or_fewer() -> None:
    assert lowest_share([100, 200, 180, 400]) == (0.9, 2)
    assert lowest_share([100]) == (1.0, 0)
    told = report([crowd(1, 100, 900, 80), crowd(2, 200), crowd(8, 100)])
    (table,) = told.tables
    assert [line[2] for line in table.rows] == ["1.00", "1.00", "0.50"]
    assert table.note.startswith("The total falls below 0.9 of the best up to there: 0.50 at least, with 8.")
    assert told.rows[-1].value == 0.5
    assert report([crowd(1, 100), crowd(2, 96)]).tables[0].note.startswith("The total never falls below 0.9")


def test_a_machine_that_is_slower_for_all_is_told_from_clients_that_cost_each_other() -> None:
    told = report([crowd(1, 200, copies=400.0), crowd(8, 100, copies=200.0)])
    assert told.rows[-1].value == 0.5
    assert told.tables[0].note.endswith("As shares of memcpy beside each round: 1.00 at least, with 1.")


def test_a_line_has_medians_percentiles_and_processor_time() -> None:
    found = report([crowd(1, 200, 100, 400)])
    (line,) = found.tables[0].rows
    assert line[:2] == ("1", "200")
    # Puts of 1 to 100, 50 and 200 ms together; 0.1 and 0.3 s of processor time over 200 calls.
    assert line[6] == "63, 197"
    assert line[8] == "0.50 + 1.50"
    assert found.rows[0].conditions["rounds"] == [200, 100, 400]


def test_where_nobody_serves_the_processes_of_clients_end_the_bench(tmp_path) -> None:
    with pytest.raises(Unavailable, match="a process of clients ended with 1"):
        run_crowd(str(tmp_path / "nobody.sock"), Effort(1, 0.1, (2,)))


def test_the_daemon_whose_time_is_counted_is_the_one_behind_the_socket(tmp_path) -> None:
    with DaemonProcess(tmp_path, {"host": "32 MiB", "device": "0"}) as daemon:
        daemon.start()
        assert _pid_behind(str(daemon.socket)) == daemon.pid != os.getpid()
