"""``kvctl`` warm and trace: prompts of a file, requests on record, and how a replay finds blocks."""

from __future__ import annotations

import gzip
import json
from itertools import count

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import Tier
from kvstore.daemon.config import Config
from kvstore.tools.kvctl import trace as trace_module
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.replay import Replay, read_trace
from kvstore.tools.kvctl.warm import read_prompts
from kvstore.v1 import inspect_pb2
from tests.client.harness import blocks_of, chain, daemon_thread, small_spec

MIB = 1 << 20


def replayed(requests, policy="lru", **sizes):
    replay = Replay({Tier[name.upper()]: blocks for name, blocks in sizes.items()}, policy)
    for ids in requests:
        replay.request(ids)
    return replay.result


def test_what_fits_is_found_and_only_from_the_start_of_a_chain():
    found = replayed([[1, 2, 3], [1, 2, 3, 4], [9, 2, 3]], host=10)
    assert (found.requests, found.blocks, found.hits, found.first) == (3, 10, 3, 5)


def test_the_least_recently_used_chain_goes_and_ssd_keeps_what_host_can_not():
    requests = [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert replayed(requests, host=4).hits == 0
    found = replayed(requests, host=4, ssd=6)
    assert (found.found[Tier.HOST], found.found[Tier.SSD]) == (0, 2)
    assert replayed([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]], host=4).hits == 4


def test_a_chain_loses_its_end_first():
    found = replayed([[1, 2, 3], [7], [1, 2, 3]], host=3)
    assert found.hits == 2


def test_a_chain_longer_than_the_tier_keeps_its_start():
    assert replayed([[1, 2, 3, 4], [1, 2, 3, 4]], host=2).hits == 2


def test_a_tier_holds_no_more_than_it_has():
    replay = Replay({Tier.HOST: 5, Tier.SSD: 8}, "lru")
    for at in range(50):
        replay.request([at % 3, 100 + at % 7, 200 + at])
        here = [replay.index.residency[slot] for slot in range(replay.index.top)]
        assert sum(bits & Tier.HOST.bit != 0 for bits in here) <= 5
        assert sum(bits & Tier.SSD.bit != 0 for bits in here) <= 8


def test_both_forms_of_traces_are_read(tmp_path):
    flat = tmp_path / "a.jsonl"
    flat.write_text('{"hash_ids": [5, 6], "timestamp": 0}\n{"hash_ids": [5, 7]}\n')
    assert list(read_trace(str(flat))) == [[0, 1], [0, 2]]
    session = {"requests": [{"hash_rle": [[1, 2], [9, 1]]}, {"requests": [{"hash_rle": [[1, 1]]}]}]}
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as out:
        out.write(f"{json.dumps(session)}\n{json.dumps(session)}\n")
    # Ids are a session's own: the same numbers in two sessions are two prefixes.
    assert list(read_trace(str(tmp_path / "b.jsonl.gz"))) == [[0, 1, 2], [0], [3, 4, 5], [3]]
    for wrong in ("{", "[]", '{"requests": 1}', '{"hash_ids": ["x"]}'):
        flat.write_text(wrong)
        with pytest.raises(InvalidArgument, match="line 1"):
            list(read_trace(str(flat)))


def test_replay_prints_a_row_a_policy(kvctl, tmp_path):
    file = tmp_path / "t"
    file.write_text("".join(json.dumps({"hash_ids": [1, 2, 3 + n % 2]}) + "\n" for n in range(4)))
    ran = kvctl("trace", "replay", str(file), "--host", "3", "--ssd", "9")
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0] == ["4", "requests,", "12", "blocks"]
    assert rows[2] == ["Policy", "HOST", "SSD", "Found", "Any", "size"]
    assert ["lru", "50.0%", "16.7%", "66.7%", "66.7%"] in rows
    found = kvctl("trace", "replay", str(file), "--host", "3", "--policy", "lru", "-l", "2", "-o", "json").json
    assert found["replays"][0]["requests"] == 2
    for words in (
        ("replay", str(file)),
        ("play", str(file), "--host", "1"),
        ("replay", str(file), "--host", "1", "--policy", "x"),
    ):
        assert kvctl("trace", *words).code == Exit.USAGE


def test_record_writes_what_is_asked_for_as_numbers(kvctl, daemon, tmp_path, monkeypatch):
    ticks = count(0.0, 0.5)
    monkeypatch.setattr(trace_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(trace_module.time, "monotonic", lambda: next(ticks))
    answers = iter([(0, 0), (2, 0), (3, 1), (3, 0), (3, 0)])

    def answer(request):
        sequence, lost = next(answers)
        reply = inspect_pb2.TraceResponse(sequence=sequence, lost=lost)
        for at in range(request.after_sequence + 1, sequence + 1):
            reply.entries.add(
                unix_seconds=100.0 + at, namespace_id=b"n", block_tokens=16, prefix_ids=[1 << 60, at], matched=1
            )
        return reply

    daemon.replies["Admin/Trace"] = answer
    file = tmp_path / "t"
    ran = kvctl("trace", "record", str(file), "--seconds", "1.7")
    assert ran.code == Exit.NO
    assert "1 request came faster" in ran.err
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["hash_ids"] for line in lines] == [[0, 1], [0, 2], [0, 3]]
    assert lines[0] == {"timestamp": 0, "input_length": 32, "output_length": 0, "hash_ids": [0, 1], "matched": 1}
    assert list(read_trace(str(file))) == [[0, 1], [0, 2], [0, 3]]


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "p"
    file.write_text('[1, 2]\n\n{"tokens": [3]}\n')
    assert list(read_prompts(str(file), "")) == [[1, 2], [3]]
    for wrong in ("[1,", '{"x": 1}', "[true]"):
        file.write_text(wrong)
        with pytest.raises(InvalidArgument):
            list(read_prompts(str(file), ""))
    file.write_text("a text")
    with pytest.raises(InvalidArgument, match="--model"):
        list(read_prompts(str(file), ""))


def test_warm_brings_blocks_back_to_host_and_record_sees_it(kvctl_at, tmp_path):
    config = Config(
        socket=tmp_path / "s", device=0, host=4 * MIB, ssd=64 * MIB, ssd_dir=tmp_path / "ssd", ssd_free_floor=0,
        ssd_segment=MIB, grpc=False,
    )  # fmt: skip
    with daemon_thread(config), Client(config.socket, ClientOptions(strict=True, buffer_bytes=MIB)) as client:
        opened = client.open_namespace(small_spec(), name="here")
        keys, tokens = chain(opened.namespace_id, 6)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        client.flush()
        assert (
            kvctl_at(config.socket, "evict", "--tier", "host", "-n", "here", *(key.hex() for key in keys)).code
            == Exit.OK
        )
        assert set(client.match(opened.namespace_id, keys).residency) == {Tier.SSD.bit}
        prompts = tmp_path / "prompts"
        prompts.write_text(json.dumps(tokens) + "\n" + json.dumps([7] * 40) + "\n")
        ran = kvctl_at(config.socket, "warm", str(prompts))
        assert (ran.code, ran.out) == (Exit.NO, "2 prompts: 6 of 8 blocks are in HOST now\n")
        assert set(client.match(opened.namespace_id, keys).residency) == {Tier.HOST.bit | Tier.SSD.bit}
