"""Every cell of every table, by the title above it: values are all different, so none can stand in another's place."""

from __future__ import annotations

import re

import pytest

from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.output import PIPE_COLUMNS, Column, columns, fitting
from kvstore.v1 import admin_pb2, common_pb2

MIB = 1 << 20


def tables(out):
    """The tables of an answer: for each a list of rows, cell by title. Cells are two blanks apart."""
    found = []
    for part in out.split("\n\n"):
        lines = [re.split(r"\s{2,}", line.strip()) for line in part.splitlines() if line.strip()]
        if len(lines) > 1 and len({len(line) for line in lines[:2]}) == 1:
            found.append([dict(zip(lines[0], line, strict=False)) for line in lines[1:]])
    return found


def facts(out):
    """Names and values, one a line."""
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines())


@pytest.fixture
def status(daemon):
    answer = admin_pb2.StatusResponse(
        version="1.2.3", pid=42, uptime_seconds=3700, boot_id=b"\xab\xcd\xef\x01" * 4, namespaces=2, sessions=3,
        leases=4, reservations=5, jobs=6,
    )  # fmt: skip
    answer.tiers.add(
        tier=common_pb2.TIER_HOST, state="ready", capacity_bytes=64 * MIB, used_bytes=48 * MIB, blocks=7,
        pinned_bytes=8 * MIB, raw_bytes=90 * MIB, saved_bytes=9 * MIB, promoted=11, demoted=12, evicted=13, removed=14,
        backing="memfd, small pages", high_watermark=0.95,
    )  # fmt: skip
    answer.tiers.add(
        tier=common_pb2.TIER_SSD, state="off", capacity_bytes=4 * MIB, raw_bytes=MIB, saved_bytes=-2 * MIB,
        backing="segments",
    )  # fmt: skip
    answer.recovery.blocks, answer.recovery.bytes, answer.recovery.seconds = 12, 3 * MIB, 0.25
    daemon.replies["Admin/Status"] = answer
    return answer


def test_status(kvctl, status):
    out = kvctl("status").out
    sizes, moves = tables(out)[-2:]
    assert sizes[0] == {
        "Tier": "HOST", "State": "ready", "Used": "━━━━━━━━── 48 MiB", "Of": "64 MiB", "Blocks": "7", "Pinned": "8 MiB",
        "Saved": "9 MiB",
    }  # fmt: skip
    assert sizes[1] == {
        "Tier": "SSD", "State": "off", "Used": "────────── 0 B", "Of": "4 MiB", "Blocks": "0", "Pinned": "-",
        "Saved": "-2 MiB",
    }  # fmt: skip
    assert "Codecs save 7 MiB of the 91 MiB" in out
    assert moves[0] == {
        "Tier": "HOST", "Promoted": "11", "Demoted": "12", "Evicted": "13", "Removed": "14",
        "Backing": "memfd, small pages",
    }  # fmt: skip
    assert out.splitlines()[:2] == [
        "kvstored 1.2.3  pid 42  up 1 h 1 min  boot abcdef01  ready",
        "2 namespaces, 2 sessions beside this one, 4 leases, 5 reservations, 6 jobs",
    ]
    assert out.splitlines()[-1] == "Recovered 12 blocks, 3 MiB, in 0.2 s (normal mode)."


def test_status_in_trouble(kvctl, status):
    status.draining = True
    status.recovery.cut_bytes, status.recovery.quarantined, status.recovery.orphans_removed = 4096, 1, 2
    status.tiers[0].used_bytes, status.tiers[0].last_error = 1, "write: No space left on device"
    status.warnings.append("The arena lies on small pages: " + "sysctl " * 40)
    ran = kvctl("status")
    assert ran.code == Exit.OK
    assert ran.out.splitlines()[0].endswith("boot abcdef01  draining")
    assert "━───────── 1 B" in ran.out
    assert "HOST: write: No space left on device" in ran.out
    assert "(normal mode); 4 KiB of torn tail cut; 1 block quarantined; 2 orphans removed." in ran.out
    assert f"! {status.warnings[0]}" in ran.out.splitlines()
    assert "Counter" not in ran.out


def test_copies_that_failed_a_check_are_told(kvctl, status):
    assert "failed a check" not in kvctl("status").out
    status.counters["ssd_quarantined"] = 1
    words = "of blocks failed a check and will not be served: kvctl quarantine, then kvctl verify"
    assert f"! 1 copy {words}" in kvctl("status").out.splitlines()
    status.counters["host_quarantined"], status.counters["device_quarantined"] = 2000, 300
    assert f"! 2,301 copies {words}" in kvctl("status").out.splitlines()


def test_status_without_a_disk_tells_of_no_recovery(kvctl, status):
    status.recovery.mode = "off"
    assert "Recovered" not in kvctl("status").out
    status.ClearField("recovery")
    assert "Recovered" not in kvctl("status").out


def test_the_bar_turns_yellow_at_the_high_watermark():
    from kvstore.tools.kvctl.status import usage  # noqa: PLC0415

    tier = admin_pb2.TierStatus(capacity_bytes=100, used_bytes=90, high_watermark=0.9)
    assert next(span.style for span in usage(tier).spans) == "yellow"
    tier.used_bytes = 89
    assert next(span.style for span in usage(tier).spans) == "green"


def test_counters_only_where_they_are_asked_for(kvctl, status):
    status.counters["b_second"], status.counters["a_first"] = 1234, 5
    assert tables(kvctl("status", "--counters").out)[-1] == [
        {"Counter": "a_first", "Value": "5"},
        {"Counter": "b_second", "Value": "1,234"},
    ]


def test_namespaces(kvctl, daemon, namespace):
    namespace.saved_bytes = 5 * MIB
    opaque = admin_pb2.NamespaceInfo(namespace_id=b"\x09" * 32, blocks_by_tier=[2, 3, 4], blocks=9)
    opaque.spec.model, opaque.spec.codec, opaque.spec.layers, opaque.spec.opaque_slice_bytes = "other", "raw", 2, 5120
    mixed = admin_pb2.NamespaceInfo(namespace_id=b"\x08" * 32, name="mixed")
    mixed.spec.CopyFrom(namespace.spec)
    mixed.spec.codec = "int8"
    mixed.spec.raw_layers.extend([0, 29])
    daemon.replies["Admin/ListNamespaces"] = admin_pb2.ListNamespacesResponse(namespaces=[namespace, opaque, mixed])
    (rows,) = tables(kvctl("ls").out)
    # In order of their names.
    assert [row["Name"] for row in rows] == ["mixed", "other", "smol"]
    assert rows[2] == {
        "Id": "000102030405", "Name": "smol", "Shape": "float16 30x3x64 raw", "Blocks": "7", "DEVICE": "1", "HOST": "5",
        "SSD": "7", "Each": "1 MiB", "Saved": "5 MiB",
    }  # fmt: skip
    assert (rows[1]["Name"], rows[1]["Shape"], rows[1]["HOST"]) == ("other", "opaque 2x5 KiB raw", "3")
    assert rows[0]["Shape"] == "float16 30x3x64 int8 raw 0,29"
    daemon.replies["Admin/ListNamespaces"] = admin_pb2.ListNamespacesResponse()
    ran = kvctl("ls")
    assert (ran.code, ran.out, ran.err) == (Exit.OK, "", "no namespace is open, and none has blocks\n")


@pytest.fixture
def block():
    return admin_pb2.BlockInfo(
        key=b"\x07" * 32, parent=b"\x06" * 32, namespace_id=bytes(range(32)), residency=6, state="promoting", pins=1,
        holds=2, children=3, idle_seconds=75, hits=1234, codec="int8", places={"HOST": "1048576", "SSD": "12"},
    )  # fmt: skip


def test_blocks(kvctl, daemon, namespace, block):
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block], next_page_token="more")
    ran = kvctl("ls", "smol", "--limit", "1")
    assert tables("\n" + ran.out) == [[{
        "Key": "070707070707", "Parent": "060606060606", "Tiers": "HOST SSD", "State": "promoting", "Codec": "int8",
        "Idle": "1 min 15 s", "Hits": "1,234", "Pins": "1", "Holds": "2", "Children": "3",
    }]]  # fmt: skip
    assert ran.err == "the 1 coldest; --limit 0 lists all\n"
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse()
    ran = kvctl("ls", "smol")
    assert (ran.code, ran.out, ran.err) == (Exit.OK, "", "no blocks\n")


def test_blocks_of_a_tier_of_all_namespaces(kvctl, daemon):
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse()
    kvctl("ls", "--tier", "SSD")
    ((method, request),) = daemon.asked
    assert (method, request.tier, request.namespace_id) == ("Admin/ListBlocks", common_pb2.TIER_SSD, b"")


@pytest.mark.parametrize(("limit", "asked"), [("7", 7), ("0", 1000), ("5000", 1000)])
def test_pages_are_as_large_as_the_daemon_allows(kvctl, daemon, namespace, limit, asked):
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse()
    kvctl("ls", "smol", "--limit", limit)
    assert daemon.asked[-1][1].limit == asked


def test_more_blocks_than_the_limit_are_neither_asked_for_nor_shown(kvctl, daemon, namespace, block):
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block] * 2, next_page_token="2")
    found = kvctl("ls", "smol", "--limit", "4", "-o", "json").json
    assert (len(found["blocks"]), found["more"]) == (4, True)
    assert [method for method, _ in daemon.asked].count("Admin/ListBlocks") == 2
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block] * 3)
    found = kvctl("ls", "smol", "--limit", "2", "-o", "json").json
    assert (len(found["blocks"]), found["more"]) == (2, True)
    assert kvctl("ls", "smol", "--limit", "3", "-o", "json").json["more"] is False


def test_one_block(kvctl, daemon, namespace, block):
    daemon.replies["Admin/ShowBlock"] = admin_pb2.ShowBlockResponse(block=block)
    assert facts(kvctl("show", "07070707").out) == {
        "key": "07" * 32, "parent": "06" * 32, "namespace": f"smol ({bytes(range(32)).hex()})", "tiers": "HOST SSD",
        "HOST": "offset 1,048,576", "SSD": "handle 12", "state": "promoting", "codec": "int8",
        "pins": "1 in place, 2 held by leases", "children": "3", "used": "1,234 times, last 1 min 15 s ago",
    }  # fmt: skip
    request = daemon.asked[-1][1]
    assert (request.namespace_id, request.key_prefix) == (namespace.namespace_id, b"\x07" * 4)
    block.ClearField("parent")
    daemon.replies["Admin/ShowBlock"] = admin_pb2.ShowBlockResponse(block=block)
    assert facts(kvctl("show", "07070707").out)["parent"] == "none: the first block of its chain"
    assert kvctl("show", "07070707", "-o", "json").json["block"]["codec"] == "int8"


def test_leases_and_sessions(kvctl, daemon):
    answer = admin_pb2.ListLeasesResponse()
    answer.leases.add(
        lease_id=9, name="decode", owner="engine-1", pid=77, seconds_left=12.5, pins=3, holds=4, buffer_bytes=5 * MIB
    )
    answer.leases.add(name="system", owner="operator", holds=6)
    answer.sessions.add(
        owner="engine-1", pid=77, uid=1000, buffer_bytes=64 * MIB, buffer_used_bytes=2 * MIB, reservations=8
    )
    answer.sessions.add(owner="far", uid=1, remote=True)
    daemon.replies["Admin/ListLeases"] = answer
    ran = kvctl("leases")
    assert (ran.code, ran.err) == (Exit.OK, "")
    leases, sessions = tables(ran.out)
    assert leases == [
        {"Lease": "9", "Name": "decode", "Owner": "engine-1", "Pid": "77", "Left": "12 s", "Pins": "3", "Holds": "4",
         "Buffer": "5 MiB"},
        {"Lease": "-", "Name": "system", "Owner": "operator", "Pid": "-", "Left": "no end", "Pins": "0", "Holds": "6",
         "Buffer": "-"},
    ]  # fmt: skip
    assert sessions == [
        {"Session": "engine-1", "Kind": "local", "Pid": "77", "Uid": "1000", "Buffer": "64 MiB", "In use": "2 MiB",
         "Reservations": "8"},
        {"Session": "far", "Kind": "remote", "Pid": "-", "Uid": "-", "Buffer": "-", "In use": "-", "Reservations": "0"},
    ]  # fmt: skip
    daemon.replies["Admin/ListLeases"] = admin_pb2.ListLeasesResponse()
    assert kvctl("leases").err == "no leases\n"


def test_quarantine(kvctl, daemon):
    entry = admin_pb2.QuarantineEntry(file="q-1", bytes=4096, key=b"\x07" * 32, cause="slice 3: checksum")
    answer = admin_pb2.ListQuarantineResponse(entries=[entry])
    daemon.replies["Admin/ListQuarantine"] = answer
    ran = kvctl("quarantine")
    assert (ran.code, ran.err) == (Exit.NO, "")
    assert tables("\n" + ran.out) == [
        [{"File": "q-1", "Bytes": "4 KiB", "Key": "070707070707", "Cause": "slice 3: checksum"}]
    ]
    assert daemon.asked[-1][1].empty is False
    answer.emptied = True
    ran = kvctl("quarantine", "--empty")
    assert (ran.code, ran.err, daemon.asked[-1][1].empty) == (Exit.OK, "1 file deleted\n", True)
    daemon.replies["Admin/ListQuarantine"] = admin_pb2.ListQuarantineResponse()
    ran = kvctl("quarantine")
    assert (ran.code, ran.out, ran.err) == (Exit.OK, "", "nothing is quarantined\n")


# ---------------------------------------------------------------- width


def test_marks_of_titles():
    assert columns("Key|>Pins|~Name|?>Each") == [
        Column("Key"),
        Column("Pins", right=True),
        Column("Name", yields=True),
        Column("Each", right=True, optional=True),
    ]


def test_optional_columns_go_where_others_would_be_cut_the_last_one_first():
    titles, rows = columns("Key|?Parent|>Hits|?>Children"), [("k" * 12, "p" * 12, "1", "2")]
    assert fitting(titles, rows, 12 + 2 + 12 + 2 + 4 + 2 + 8) == [0, 1, 2, 3]
    assert fitting(titles, rows, 12 + 2 + 12 + 2 + 4 + 2 + 7) == [0, 1, 2]
    assert fitting(titles, rows, 12 + 2 + 12 + 2 + 3) == [0, 2]
    assert fitting(titles, rows, 5) == [0, 2]


def test_columns_that_wrap_need_no_more_than_they_can_be_read_in():
    titles, rows = columns("~Name|?>Each"), [("n" * 100, "1")]
    assert fitting(titles, rows, 16 + 2 + 4) == [0, 1]
    assert fitting(titles, rows, 16 + 2 + 3) == [0]


def test_a_narrow_terminal_cuts_no_word(kvctl, daemon, namespace, block, monkeypatch):
    monkeypatch.setattr("kvstore.tools.output.PIPE_COLUMNS", 80)
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block])
    lines = kvctl("ls", "smol").out.splitlines()
    assert "…" not in "".join(lines)
    assert lines[0].split() == ["Key", "Parent", "Tiers", "State", "Idle", "Hits", "Pins", "Holds"]
    # Numbers end where their titles do.
    assert lines[1][: lines[0].index("Hits") + 4].endswith("1,234")
    assert lines[1][: lines[0].index("Holds") + 5].endswith("2")
    namespace.name = "a name of many words that wraps"
    daemon.replies["Admin/ListNamespaces"] = admin_pb2.ListNamespacesResponse(namespaces=[namespace])
    lines = kvctl("ls").out.splitlines()
    assert len(lines) > 2
    assert "…" not in "".join(lines)
    assert {"a", "name", "of", "many", "words", "that", "wraps"} <= set(" ".join(lines).split())


def test_sixty_columns_cut_no_word(kvctl, daemon, status, namespace, block, monkeypatch):
    monkeypatch.setattr("kvstore.tools.output.PIPE_COLUMNS", 60)
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block])
    daemon.replies["Admin/ListNamespaces"] = admin_pb2.ListNamespacesResponse(namespaces=[namespace])
    for asked in (("status",), ("ls",), ("ls", "smol")):
        ran = kvctl(*asked)
        assert (ran.code, ran.out.count("…"), len(ran.out.splitlines()) > 1) == (Exit.OK, 0, True)


def test_a_pipe_gets_every_column(kvctl, daemon, namespace, block):
    assert PIPE_COLUMNS >= 200
    daemon.replies["Admin/ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block])
    assert "Children" in kvctl("ls", "smol").out
