"""What each command asks, prints and answers a shell, over a daemon that says what the test tells it to."""

from __future__ import annotations

import json

import pytest

from kvstore.core.keys import chain_keys
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.output import plain
from kvstore.v1 import admin_pb2, cache_pb2, common_pb2

HIT, MISS, BUSY = common_pb2.OUTCOME_HIT, common_pb2.OUTCOME_MISS, common_pb2.OUTCOME_BUSY
TOKENS = "1,2,3,4,5,6,7,8,9,10,11,12,13"


@pytest.fixture
def status(daemon):
    answer = admin_pb2.StatusResponse(version="1.2.3", pid=42, uptime_seconds=3700, boot_id=b"\xaa" * 16, sessions=2)
    answer.tiers.add(tier=common_pb2.TIER_DEVICE, state="ready", capacity_bytes=64 << 20, used_bytes=48 << 20, blocks=3)
    answer.tiers.add(
        tier=common_pb2.TIER_SSD,
        state="ready",
        capacity_bytes=4 << 30,
        used_bytes=1 << 30,
        raw_bytes=2 << 30,
        saved_bytes=1 << 30,
        evicted=5,
    )
    answer.recovery.blocks = 12
    answer.warnings.append("The arena lies on small pages: sysctl -w vm.nr_hugepages=160")
    answer.counters["store_hits"] = 1234
    daemon.replies["Admin/Status"] = answer
    return answer


def test_status_shows_tiers_recovery_and_warnings(kvctl, status):
    ran = kvctl("status", "--counters")
    assert ran.code == Exit.OK
    for words in (
        "1.2.3",
        "pid 42",
        "1 h 1 min",
        "48 MiB",
        "64 MiB",
        "Recovered 12 blocks",
        "vm.nr_hugepages=160",
        "1,234",
    ):
        assert words in ran.out
    assert "1 GiB" in next(line for line in ran.out.splitlines() if line.startswith("SSD"))
    assert "Codecs save 1 GiB of the 2 GiB" in ran.out


def test_status_says_no_when_a_tier_is_degraded(kvctl, status):
    status.tiers[1].state, status.tiers[1].last_error = "degraded", "write: No space left on device"
    ran = kvctl("status")
    assert ran.code == Exit.NO
    assert "No space left" in ran.out


def test_json_names_every_field(kvctl, status):
    ran = kvctl("status", "-o", "json")
    assert ran.json == {**plain(status), "own_sessions": 1}
    assert ran.json["tiers"][1]["tier"] == "ssd"
    assert ran.json["boot_id"] == "aa" * 16
    assert set(ran.json) == {field.name for field in status.DESCRIPTOR.fields} | {"own_sessions"}
    assert ran.err == ""


def test_ls_lists_namespaces(kvctl, namespace):
    ran = kvctl("ls")
    assert ran.code == Exit.OK
    (row,) = [line for line in ran.out.splitlines() if "smol" in line]
    assert row.split()[:2] == ["000102030405", "smol"]
    assert row.split()[-7:] == ["7", "1", "5", "7", "1", "MiB", "-"]


def test_ls_pages_through_blocks(kvctl, daemon, namespace):
    def page(request):
        start = int(request.page_token or 0)
        blocks = [admin_pb2.BlockInfo(key=bytes([n]) * 32, residency=6, state="ready") for n in range(start, start + 2)]
        return admin_pb2.ListBlocksResponse(blocks=blocks, next_page_token=str(start + 2) if start < 4 else "")

    daemon.replies["Admin/ListBlocks"] = page
    assert len(kvctl("ls", "smol", "-o", "json").json["blocks"]) == 6
    ran = kvctl("ls", "smol", "--limit", "3", "--tier", "host", "-o", "json")
    assert ran.json["more"] is True
    assert len(ran.json["blocks"]) == 3
    assert daemon.asked[-1][1].tier == common_pb2.TIER_HOST
    table = kvctl("ls", "smol").out
    assert "HOST SSD" in table
    assert "050505050505" in table


def test_a_namespace_can_be_named_in_three_ways(kvctl, daemon, namespace):
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse()
    for name in ("smol", "SmolLM2-135M", "000102"):
        assert kvctl("ls", name).code == Exit.OK
        assert daemon.asked[-1][1].namespace_id == namespace.namespace_id
    ran = kvctl("ls", "other")
    assert ran.code == Exit.NOT_FOUND
    assert "smol (000102030405)" in ran.err


def test_an_ambiguous_namespace_is_asked_back(kvctl, daemon, namespace):
    second = admin_pb2.NamespaceInfo(namespace_id=b"\x01" * 32, name="big")
    daemon.replies["Admin/ListNamespaces"].namespaces.append(second)
    ran = kvctl("match", "--tokens", TOKENS)
    assert ran.code == Exit.USAGE
    assert "smol" in ran.err
    assert "big" in ran.err


def test_show(kvctl, daemon, namespace):
    block = admin_pb2.BlockInfo(
        key=b"\x07" * 32, residency=4, state="ready", hits=1, places={"SSD": "segment 3 at 4096"}
    )
    daemon.replies["Admin/ShowBlock"] = admin_pb2.ShowBlockResponse(block=block)
    ran = kvctl("show", "07070707")
    assert "segment 3 at 4096" in ran.out
    assert "used" in ran.out
    assert daemon.asked[-1][1].key_prefix == b"\x07" * 4


def test_match_computes_the_keys_and_shows_runs(kvctl, daemon, namespace):
    daemon.replies["Cache/Match"] = cache_pb2.MatchResponse(
        matched=2, residency=[3, 4], reason=common_pb2.REASON_EVICTED
    )
    ran = kvctl("match", "--tokens", TOKENS)
    assert ran.code == Exit.NO
    assert "2 of 3 blocks matched: 8 of 13 tokens" in ran.out
    assert "DEVICE HOST" in ran.out
    assert "evicted" in ran.out
    keys = chain_keys(namespace.namespace_id, list(range(1, 14)), 4)
    assert daemon.asked[-1][1].keys == b"".join(keys)
    assert ran.out.count(keys[2].hex()[:12]) == 1


def test_match_is_yes_when_all_is_here(kvctl, daemon, namespace):
    daemon.replies["Cache/Match"] = lambda request: cache_pb2.MatchResponse(
        matched=len(request.keys) // 32, residency=[2] * (len(request.keys) // 32)
    )
    ran = kvctl("match", "--tokens", "-", "-o", "json", stdin=" ".join(map(str, range(4 * 4100))))
    assert ran.code == Exit.OK
    assert (ran.json["blocks"], ran.json["matched"], len(ran.json["residency"])) == (4100, 4100, 4100)
    assert [len(request.keys) // 32 for method, request in daemon.asked if method == "Cache/Match"] == [4096, 4]


def test_match_of_less_than_a_block_is_a_usage_error(kvctl, namespace):
    ran = kvctl("match", "--tokens", "1,2,3")
    assert ran.code == Exit.USAGE
    assert "one whole block" in ran.err


def test_why_explains(kvctl, daemon, namespace):
    answer = admin_pb2.WhyResponse(
        blocks=3, matched=1, residency=[2], key=b"\x09" * 32, reason=common_pb2.REASON_EVICTED, seconds_ago=90
    )
    answer.explanation = "It was the coldest leaf when HOST was full."
    answer.near.add(namespace_id=b"\x05" * 32, fields=["dtype", "rope"], blocks=3)
    daemon.replies["Admin/Why"] = answer
    ran = kvctl("why", "--tokens", TOKENS)
    assert ran.code == Exit.NO
    for words in ("Block 1 of 3 (090909090909)", "evicted, 1 min 30 s ago", "coldest leaf", "differs in dtype, rope"):
        assert words in ran.out
    assert list(daemon.asked[-1][1].token_ids) == list(range(1, 14))
    answer.matched = 3
    assert kvctl("why", "--tokens", TOKENS).code == Exit.OK


def test_evict_by_bytes_and_by_key(kvctl, daemon, namespace):
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(blocks=2, bytes=3 << 20)
    ran = kvctl("evict", "--tier", "host", "--bytes", "2MiB")
    assert (ran.code, ran.out) == (Exit.OK, "2 blocks, 3 MiB, left HOST\n")
    assert daemon.asked[-1][1].bytes == 2 << 20
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(blocks=0, outcomes=[BUSY])
    ran = kvctl("evict", "--tier", "ssd", "07" * 32)
    assert ran.code == Exit.REFUSED
    assert "leased" in ran.err
    assert daemon.asked[-1][1].keys == b"\x07" * 32
    assert daemon.asked[-1][1].tier == common_pb2.TIER_SSD


@pytest.mark.parametrize(
    "words", [(), ("--bytes", "1MiB"), ("07" * 32,), ("07070707", "--bytes", "1", "--tier", "host"), ("--tier", "x")]
)
def test_evict_refuses_what_it_cannot_mean(kvctl, daemon, namespace, words):
    assert kvctl("evict", *words).code == Exit.USAGE
    assert [method for method, _ in daemon.asked if method == "Admin/Evict"] == []


def test_pin_and_unpin(kvctl, daemon, namespace):
    daemon.replies["Admin/Pin"] = admin_pb2.PinResponse(outcomes=[HIT, MISS])
    ran = kvctl("pin", "system-prompt", "07" * 32, "08" * 32)
    assert (ran.code, ran.out) == (Exit.NO, "1 of 2 blocks pinned as system-prompt\n")
    daemon.replies["Admin/Unpin"] = admin_pb2.UnpinResponse(released=1)
    assert kvctl("unpin", "system-prompt").code == Exit.OK
    daemon.replies["Admin/Unpin"] = admin_pb2.UnpinResponse(released=0)
    assert kvctl("unpin", "system-prompt").code == Exit.NOT_FOUND


def test_a_short_key_is_completed_by_the_daemon(kvctl, daemon, namespace):
    daemon.replies["Admin/ShowBlock"] = admin_pb2.ShowBlockResponse(block=admin_pb2.BlockInfo(key=b"\x07" * 32))
    daemon.replies["Admin/Pin"] = admin_pb2.PinResponse(outcomes=[HIT])
    assert kvctl("pin", "x", "07070707").code == Exit.OK
    assert daemon.asked[-1][1].keys == b"\x07" * 32


def test_leases(kvctl, daemon):
    answer = admin_pb2.ListLeasesResponse()
    answer.leases.add(lease_id=9, name="decode", owner="engine-1", pid=77, seconds_left=12.5, pins=3)
    answer.sessions.add(owner="engine-1", pid=77, buffer_bytes=64 << 20)
    daemon.replies["Admin/ListLeases"] = answer
    ran = kvctl("leases")
    assert ran.code == Exit.OK
    assert any(line.split()[:4] == ["9", "decode", "engine-1", "77"] for line in ran.out.splitlines())
    assert "64 MiB" in ran.out


def test_drain(kvctl, daemon):
    daemon.replies["Admin/Drain"] = admin_pb2.DrainResponse(draining=True, flushed_blocks=4, unflushed_blocks=1)
    ran = kvctl("drain", "--timeout", "10")
    assert ran.code == Exit.NO
    assert daemon.asked[-1][1].timeout_ms == 9000
    assert daemon.timeouts == [10.0]
    daemon.replies["Admin/Drain"] = admin_pb2.DrainResponse()
    assert kvctl("drain", "--resume").code == Exit.OK
    assert daemon.asked[-1][1].resume


def test_verify(kvctl, daemon, namespace):
    daemon.replies["Admin/Verify"] = admin_pb2.VerifyResponse(blocks=2, bytes=2 << 20, seconds=0.5)
    ran = kvctl("verify", "--rate", "200MiB")
    assert (ran.code, ran.out) == (Exit.OK, "2 blocks, 2 MiB, read in 0.5 s, 4 MiB/s; none bad\n")
    assert daemon.asked[-1][1].bytes_per_second == 200 << 20
    daemon.replies["Admin/Verify"] = admin_pb2.VerifyResponse(blocks=2, bad=1, bad_keys=[b"\x07" * 32])
    ran = kvctl("verify", "-n", "smol")
    assert ran.code == Exit.NO
    assert "bad: " + "07" * 32 in ran.out


def test_compact_du_and_quarantine(kvctl, daemon):
    daemon.replies["Admin/Compact"] = admin_pb2.CompactResponse(segments=2, bytes_freed=1 << 20)
    assert "2 segments rewritten" in kvctl("compact", "--above", "0.5").out
    assert daemon.asked[-1][1].fragmentation == 0.5
    usage = admin_pb2.DiskUsageResponse(
        directory="/var/x", cap_bytes=4 << 30, ledger_bytes=1 << 30, coded_saved_bytes=3 << 20
    )
    usage.segments.add(segment_id=7, file_bytes=100, live_bytes=25, blocks=1)
    daemon.replies["Admin/DiskUsage"] = usage
    ran = kvctl("du", "--segments")
    assert "saved by lz4" in ran.out
    assert "3 MiB" in ran.out
    assert json.loads(kvctl("du", "--output", "json").out)["coded_saved_bytes"] == 3 << 20
    assert ran.code == Exit.OK
    assert "1 GiB of 4 GiB (25.0%)" in ran.out
    assert "75%" in ran.out
    usage.ledger_bytes = 5 << 30
    assert kvctl("du").code == Exit.NO
    entry = admin_pb2.QuarantineEntry(file="q-1", bytes=4096, cause="slice 3: checksum")
    daemon.replies["Admin/ListQuarantine"] = admin_pb2.ListQuarantineResponse(entries=[entry])
    ran = kvctl("quarantine")
    assert ran.code == Exit.NO
    assert "slice 3: checksum" in ran.out
    daemon.replies["Admin/ListQuarantine"].emptied = True
    assert kvctl("quarantine", "--empty").code == Exit.OK
