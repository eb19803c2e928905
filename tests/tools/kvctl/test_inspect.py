"""``kvctl`` top, tree, explain, forget and size: what is asked, what is printed, at 160 and at 60 columns."""

from __future__ import annotations

import json

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.sizing import bytes_a_token, read_config, spec_of, tier_size
from kvstore.core.types import Tier
from kvstore.tools.kvctl import top
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.tree import branches
from kvstore.v1 import admin_pb2, common_pb2, inspect_pb2

MIB = 1 << 20
GIB = 1 << 30
KEY = bytes([0xAB]) * 32


@pytest.fixture(params=[160, 60], ids=["160", "60"])
def wide(request, monkeypatch):
    """The width of a terminal."""
    monkeypatch.setattr("kvstore.tools.output.PIPE_COLUMNS", request.param)
    return request.param


def fits(out, width):
    return max(map(len, out.splitlines())) <= width and "…" not in out


def test_branches_are_drawn():
    assert branches([0, 1, 2, 2, 1, 0, 1]) == ["", "├─ ", "│  ├─ ", "│  └─ ", "└─ ", "", "└─ "]


@pytest.fixture
def tree(daemon, namespace):
    answer = inspect_pb2.TreeResponse(blocks=1234, hidden=2)
    for level, key, blocks, total, hits, hidden in ((0, 1, 6, 1200, 140, 0), (1, 2, 7, 10, 5, 3), (1, 3, 4, 4, 1, 0)):
        answer.nodes.add(
            level=level, key=bytes([key]) * 32, blocks=blocks, residency=6, total_blocks=total, hits=hits,
            total_bytes=total * 4096, idle_seconds=7.0, hidden=hidden,
        )  # fmt: skip
    daemon.replies["Admin/Tree"] = answer
    return answer


def test_tree(kvctl, daemon, tree, wide):
    ran = kvctl("tree", "-l", "3")
    assert daemon.asked[-1][1].limit == 3
    assert fits(ran.out, wide)
    lines = [line.rstrip() for line in ran.out.splitlines()]
    assert lines[0] == "smol (000102030405): 1,234 blocks"
    assert lines[3:] == [
        "01010101         24   1,200  4.7 MiB   140  7.0 s  HOST SSD",
        "├─ 02020202      28      10   40 KiB     5  7.0 s  HOST SSD",
        "└─ 03030303      16       4   16 KiB     1  7.0 s  HOST SSD",
    ]
    assert "5 more branches: --limit shows them" in ran.err
    found = kvctl("tree", "-o", "json").json
    assert found["nodes"][0]["residency"] == ["host", "ssd"]
    assert found["nodes"][0]["total_blocks"] == 1200


def test_explain_of_a_block_that_is_here(kvctl, daemon, namespace, wide):
    answer = inspect_pb2.ExplainResponse(key=KEY, depth=2, children=1, hits=9, idle_seconds=3.0)
    answer.copies.add(tier=common_pb2.TIER_HOST, bytes=MIB, fate="stays", kept=["pinned", "children"], colder=5, of=9)
    answer.copies.add(tier=common_pb2.TIER_SSD, bytes=MIB, fate="goes", colder=1, of=4)
    answer.keepers.add(kind="lease", name="reader", owner="engine", pid=17, seconds_left=65)
    answer.keepers.add(kind="operator", name="prompt", owner="operator")
    daemon.replies["Admin/Explain"] = answer
    ran = kvctl("explain", "abababab")
    assert ran.code == Exit.OK
    assert daemon.asked[-1][1].key_prefix == KEY[:4]
    assert fits(ran.out, wide)
    said = " ".join(ran.out.split())
    for part in (
        "Block 2 of its chain, 1 block directly behind it; used 9 times, last 3.0 s ago.",
        "HOST: 1 MiB; 5 of 9 blocks there were used longer ago. It stays: a reader has it pinned, see kvctl leases; "
        "blocks behind it in its chain lie in this tier",
        "SSD: 1 MiB; 1 of 4 blocks there were used longer ago. If room is needed it is dropped; another copy remains.",
        "Kept by the lease 'reader' of pid 17, for 1 min 5 s more.",
        "Kept by the pin 'prompt' of operator, until it is let go.",
    ):
        assert part in said


def test_explain_of_a_block_that_is_gone(kvctl, daemon, namespace):
    daemon.replies["Admin/Explain"] = inspect_pb2.ExplainResponse(
        key=KEY, reason=common_pb2.REASON_EVICTED, seconds_ago=90
    )
    ran = kvctl("explain", KEY.hex())
    assert (ran.code, ran.out) == (Exit.NO, "abababababab is not here: evicted, 1 min 30 s ago.\n")


def test_evict_says_why_blocks_stay_and_when_it_did_less(kvctl, daemon, namespace):
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(
        outcomes=[common_pb2.OUTCOME_BUSY, common_pb2.OUTCOME_HIT], kept=["children", ""], blocks=1, bytes=MIB
    )
    ran = kvctl("evict", KEY.hex(), "cd" * 32, "--tier", "host")
    assert ran.code == Exit.REFUSED
    assert "abababababab stayed: blocks behind it in its chain lie in this tier" in ran.err
    assert "cdcdcdcdcdcd" not in ran.err
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(blocks=1, bytes=MIB, kept_bytes=2 * MIB)
    ran = kvctl("evict", "--bytes", "4MiB", "--tier", "host")
    assert (ran.code, ran.err) == (
        Exit.OK,
        "3 MiB less than asked: 2 MiB are leased or pinned, see kvctl leases\n",
    )
    daemon.replies["Admin/Evict"] = admin_pb2.EvictResponse(blocks=5, bytes=5 * MIB)
    assert kvctl("evict", "--bytes", "4MiB", "--tier", "host").code == Exit.OK


def test_forget_goes_in_steps_until_nothing_goes(kvctl, daemon, namespace):
    steps = iter([(5, 2), (1, 1), (0, 1)])

    def forget(_request):
        removed, left = next(steps)
        return inspect_pb2.ForgetResponse(removed=removed, left=left, kept=left)

    daemon.replies["Admin/Forget"] = forget
    ran = kvctl("forget", "smol", "--yes")
    assert (ran.code, ran.out) == (Exit.REFUSED, "6 blocks removed\n")
    assert "1 block stay" in ran.err
    assert [method for method, _ in daemon.asked].count("Admin/Forget") == 3


def test_forget_asks_first(kvctl, daemon, namespace):
    ran = kvctl("forget", "smol", stdin="n\n")
    assert ran.code == Exit.NO
    assert "Remove 7 blocks of smol (000102030405) from every tier?" in ran.err
    assert "Admin/Forget" not in dict(daemon.asked)


@pytest.fixture
def moments(daemon, namespace, monkeypatch):
    """Two looks, two seconds apart."""
    times = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    monkeypatch.setattr(top.time, "monotonic", lambda: next(times))
    counts = iter([(100, 0), (190, 10), (190, 10)])

    def status(_request):
        found, missed = next(counts)
        answer = admin_pb2.StatusResponse(version="1.2", uptime_seconds=60, sessions=3, leases=1)
        answer.tiers.add(tier=common_pb2.TIER_HOST, state="ready", capacity_bytes=4 * MIB, used_bytes=MIB, blocks=7)
        answer.counters.update({"match_found": found, "match_missed_evicted": missed, "host_evicted": missed})
        return answer

    daemon.replies["Admin/Status"] = status


def test_top_tells_what_happens_a_second(kvctl, moments, wide):
    ran = kvctl("top", "--count", "1")
    assert fits(ran.out, wide)
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert lines[0] == "kvstored 1.2 up 1 min 0 s ready"
    assert lines[1] == "2 sessions beside this one, 1 lease, 0 jobs"
    assert " ".join(lines[2:4]).startswith("90% of the blocks asked for are here; 45 found, 5 missed, 0 put a second")
    assert any(line.startswith("HOST ━━") and line.endswith("5/s 0/s") for line in lines)


def test_top_as_json_is_a_line_a_look(kvctl, moments):
    lines = [json.loads(line) for line in kvctl("top", "--count", "2", "-o", "json").out.splitlines()]
    assert [line["hit_ratio"] for line in lines] == [0.9, None]
    assert lines[0]["evicted_per_second"]["host"] == 5.0


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_size_of_a_model_in_given_tiers(kvctl, tmp_path, wide):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ran = kvctl("size", str(tmp_path), "--host", "64GiB", "--ssd", "1TiB")
    assert fits(ran.out, wide)
    said = " ".join(ran.out.split())
    assert "32 layers x 8 KV heads x 128, bfloat16, raw: 128 KiB a token" in said
    found = kvctl("size", str(tmp_path), "--host", "64GiB", "-o", "json").json
    (host,) = found["tiers"]
    assert host["tokens"] == int(64 * GIB * 0.95) // host["block_bytes"] * 64
    # 2 x 32 layers x 8 heads x 128 x 2 bytes, and a header a block.
    assert 131072 <= found["bytes_per_token"] < 131072 * 1.01
    assert kvctl("size", str(tmp_path), "--host", "64GiB", "--codec", "int8", "-o", "json").json["tiers"][0][
        "tokens"
    ] > (1.8 * host["tokens"])


def test_size_takes_tiers_and_watermarks_of_the_running_daemon(kvctl, daemon, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    answer = admin_pb2.StatusResponse()
    answer.tiers.add(tier=common_pb2.TIER_DEVICE, capacity_bytes=GIB, high_watermark=0.5)
    daemon.replies["Admin/Status"] = answer
    (device,) = kvctl("size", str(tmp_path), "-o", "json").json["tiers"]
    assert (device["tier"], device["watermark"]) == ("device", 0.5)
    assert device["tokens"] == int(GIB * 0.5) // device["block_bytes"] * 64


@pytest.mark.parametrize(
    ("config", "heads", "width"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12, 64),
        ({"num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, 1, 64),
        ({"text_config": {"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 256}}, 8, 256),
    ],
)
def test_families_name_their_fields_in_their_own_ways(tmp_path, config, heads, width):
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of(read_config(str(tmp_path)))
    assert (spec.kv_heads, spec.head_dim) == (heads, width)
    assert tier_size(spec, Tier.HOST, GIB, 1.0).tokens == pytest.approx(GIB / bytes_a_token(spec), rel=0.01)


@pytest.mark.parametrize(
    ("text", "field"),
    [("{", "MODEL"), ("[]", "MODEL"), ("{}", "num_attention_heads"), ('{"kv_lora_rank": 512}', "kv_lora_rank"),
     ('{"n_head": -1}', "n_head")],
)  # fmt: skip
def test_a_config_that_is_none_is_refused(kvctl, tmp_path, text, field):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument, match=field):
        spec_of(read_config(str(tmp_path)))
    assert kvctl("size", str(tmp_path), "--host", "1GiB").code == Exit.USAGE
    assert kvctl("size", str(tmp_path / "none"), "--host", "1GiB").code == Exit.USAGE
