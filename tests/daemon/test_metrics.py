"""What Prometheus reads: every metric of the table, each moved by what it counts; and the health of the loop."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.core.histogram import BOUNDS_S
from kvstore.core.types import Target
from kvstore.daemon import exposition, main, plan
from kvstore.daemon.config import Config
from kvstore.daemon.daemon import Daemon
from kvstore.daemon.metrics import METRICS, Snapshot
from kvstore.rpc.times import CallTimes
from kvstore.store.report import StatusReport
from tests.client.harness import blocks_of, chain, daemon_thread, small_spec, until
from tests.daemon.ground import ask, moved, scrape

MIB = 1 << 20
OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("d")
    config = Config(
        socket=folder / "s", device=0, host=4 * MIB, ssd=64 * MIB, ssd_dir=folder / "ssd", ssd_free_floor=0,
        ssd_segment=MIB, metrics_listen="0", grpc=False,
    )  # fmt: skip
    with daemon_thread(config) as found:
        yield found


def test_the_table_of_the_documents_is_what_is_exported(daemon: Daemon):
    rows = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", OPERATIONS.read_text(), re.MULTILINE)
    told = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows]
    assert told == [(m.name, m.kind, m.labels, m.text) for m in METRICS]
    shown = re.findall(r"^# TYPE (\w+) \w+$", ask(daemon.metrics_port, "/metrics")[1], re.MULTILINE)
    assert shown == [m.name + ("_info" if m.kind == "info" else "") for m in METRICS]


def test_puts_hits_and_misses_move_what_counts_them(daemon: Daemon):
    spec = small_spec()
    with Client(daemon._config.socket, ClientOptions(strict=True, buffer_bytes=MIB)) as client:
        before = scrape(daemon.metrics_port)
        opened = client.open_namespace(spec)
        keys, _ = chain(opened.namespace_id, 4)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys[:3]))
        client.match(opened.namespace_id, keys)
        lease = client.grant_lease("reader", 30_000)
        client.fetch(opened.namespace_id, keys, Target.IN_PLACE, lease_id=lease)
        now = moved(before, scrape(daemon.metrics_port))
        assert now["kvstore_match_found_total",] == 3
        assert now["kvstore_match_missed_total", "never_stored"] == 1
        assert now["kvstore_fetch_found_total", "host"] == 3
        assert now["kvstore_fetch_missed_total", "never_stored"] == 1
        assert now["kvstore_tier_blocks", "host"] == 3
        assert now["kvstore_tier_used_bytes", "host"] > 0
        assert now["kvstore_tier_pinned_bytes", "host"] > 0
        assert (now["kvstore_leases",], now["kvstore_namespaces",], now["kvstore_copies", "pinned"]) == (1, 1, 3)
        assert now["kvstore_call_seconds_count", "Cache/Match"] == 1
        assert now["kvstore_call_seconds_bucket", "+Inf", "Cache/Match"] == 1
        assert now["kvstore_call_seconds_sum", "Cache/Match"] > 0
        assert scrape(daemon.metrics_port)["kvstore_sessions",] == 1
    until(lambda: moved(before, scrape(daemon.metrics_port)).get(("kvstore_sessions_ended_total",), 0) >= 1)


def test_refusals_are_counted_by_method_and_reason(daemon: Daemon):
    before = scrape(daemon.metrics_port)
    with Client(daemon._config.socket, ClientOptions(strict=True)) as client:
        with pytest.raises(InvalidArgument):
            client.connection()[0].call("kvstore.v1.Admin/ListBlocks", b"\x18\xff\xff\xff\x0f", 9)
        with pytest.raises(InvalidArgument):
            client.connection()[0].call("kvstore.v1.Admin/NoSuchThing", b"", 9)
    now = moved(before, scrape(daemon.metrics_port))
    assert now["kvstore_call_failures_total", "Admin/ListBlocks", "invalid_argument"] == 1
    assert not [name for name in now if "Admin/NoSuchThing" in name]


def test_what_no_row_names_is_exported_under_its_own_name():
    now = Snapshot("1", cast(StatusReport, None), {"something_new": 7, "loop_turns_over_5_ms": 2}, {}, {})
    rows = {metric.name: metric for metric in METRICS}
    assert list(rows["kvstore_events_total"].read(now)) == [(("something_new",), 7)]
    assert list(rows["kvstore_loop_turns_over_total"].read(now)) == [(("5",), 2)]


def test_nothing_of_a_tenant_is_told(daemon: Daemon):
    with Client(daemon._config.socket, ClientOptions(strict=True, name="hers")) as client:
        opened = client.open_namespace(small_spec(model="secretmodel", salt=b"secretsalt"))
        for path in ("/metrics", "/healthz"):
            text = ask(daemon.metrics_port, path)[1]
            assert not re.search(f"secretmodel|secretsalt|hers|{opened.namespace_id.hex()}", text)


def test_health_says_whether_the_loop_turns(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    status, body = ask(daemon.metrics_port, "/healthz")
    assert status == 200
    assert '"alive": true' in body
    assert '"degraded": []' in body
    monkeypatch.setattr(daemon, "_loop", None)
    assert ask(daemon.metrics_port, "/healthz") == (503, '{"alive": false}\n')


def test_other_paths_and_methods_are_refused(daemon: Daemon):
    assert ask(daemon.metrics_port, "/nothing")[0] == 404
    assert ask(daemon.metrics_port, "/metrics", "POST")[0] == 501


def test_more_connections_than_there_is_room_for_are_closed(daemon: Daemon):
    address = ("127.0.0.1", daemon.metrics_port)
    silent = [socket.create_connection(address, timeout=10) for _ in range(exposition.CONNECTIONS_MAX)]
    try:
        with socket.create_connection(address, timeout=10) as late:
            assert late.recv(1) == b""
    finally:
        for one in silent:
            one.close()


@pytest.mark.parametrize(
    ("given", "address"),
    [("9464", ("127.0.0.1", 9464)), (":1", ("127.0.0.1", 1)), ("[::1]:7", ("::1", 7)), ("0.0.0.0:7", ("0.0.0.0", 7))],
)
def test_a_port_alone_is_loopback(given: str, address: tuple[str, int]):
    assert Config(metrics_listen=given).metrics_address == address
    assert Config().metrics_address is None


@pytest.mark.parametrize("given", ["x", "1.2.3.4", "1:65536", "a/b:1", "::1:7"])
def test_what_is_no_address_is_refused(given: str):
    with pytest.raises(InvalidArgument, match="metrics_listen"):
        Config(metrics_listen=given)


def test_a_port_in_use_ends_the_start_in_one_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        arguments = [f"--socket={tmp_path}/s", "--device=0", "--host=1MiB", "--no-grpc"]
        found = CliRunner().invoke(main.make_app(), [*arguments, f"--metrics-listen={other.getsockname()[1]}"])
    assert found.exit_code == main.EXIT_START
    assert not isinstance(found.exception, InvalidArgument)


def test_the_plan_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    config = Config(metrics_listen="9464")
    assert "http://127.0.0.1:9464/metrics" in plan.plan_text(config)[0]
    monkeypatch.setattr(plan, "find_spec", lambda _: None)
    assert "tiered-kvstore[daemon]" in plan.refusal(plan.make_plan(config))


def test_times_fall_into_the_bucket_whose_bound_they_do_not_pass():
    times = CallTimes(lambda: 0.0)
    for seconds in (BOUNDS_S[0], BOUNDS_S[0] * 1.5, 1e9):
        times.count("A/B", -seconds)
    (found,) = times.by_method().values()
    assert {place: count for place, count in enumerate(found.within) if count} == {0: 1, 1: 1, len(BOUNDS_S): 1}
