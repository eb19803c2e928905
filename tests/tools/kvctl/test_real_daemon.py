"""Every command against a real daemon: what it says is what was stored."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Durability, Outcome
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tools.kvctl.exits import Exit

BLOCKS = 4
TOKENS = list(range(100, 100 + 64 * BLOCKS + 10))


@pytest.fixture(scope="module")
def spec():
    return NamespaceSpec(model="smol", revision="1", dtype="float16", layers=2, kv_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def client(real_daemon):
    with Client(real_daemon.socket, ClientOptions(name="tester", strict=True)) as client:
        yield client


@pytest.fixture(scope="module")
def keys(client, spec):
    """A chain of four blocks, stored and durable."""
    opened = client.open_namespace(spec, name="prompts")
    keys = chain_keys(opened.namespace_id, TOKENS, 64)
    payload = bytes(range(256)) * (opened.layout.layers * opened.layout.slice_bytes // 256)
    blocks = PutBlocks(keys, parents_of(keys), [payload] * BLOCKS, durability=Durability.DURABLE)
    assert set(client.put(opened.namespace_id, blocks).outcomes) == {Outcome.HIT}
    return keys


@pytest.fixture
def run(real_daemon):
    """Runs the command as a shell would; returns exit code, stdout, stderr."""

    def kvctl(*words):
        command = [sys.executable, "-c", "from kvstore.tools.kvctl.main import main; main()", *words]
        done = subprocess.run(
            [*command, "--socket", str(real_daemon.socket)], capture_output=True, text=True, check=False, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    return kvctl


@pytest.fixture
def ask(run):
    """Runs the command for its JSON."""

    def kvctl(*words, code=Exit.OK):
        found, out, err = run(*words, "-o", "json")
        assert found == code, err
        return json.loads(out)

    return kvctl


def test_status_counts_what_was_stored(ask, run, keys):
    status = ask("status")
    tiers = {tier["tier"]: tier for tier in status["tiers"]}
    assert set(tiers) == {"device", "host", "ssd"}
    assert tiers["host"]["blocks"] == tiers["ssd"]["blocks"] == BLOCKS
    assert tiers["device"]["capacity_bytes"] == 8 << 20
    assert (status["namespaces"], status["draining"]) == (1, False)
    code, out, err = run("status", "--counters")
    assert (code, err) == (Exit.OK, "")
    assert "ssd_blocks_written" in out


def test_every_counter_is_documented(ask, keys, root):
    text = (root / "docs" / "operations.md").read_text()
    names = set(re.findall(r"`([a-z_0-9]+\*?)`", text))
    starts = tuple(name.rstrip("*") for name in names if name.endswith("*"))
    unknown = [n for n in ask("status")["counters"] if n not in names and not (starts and n.startswith(starts))]
    assert unknown == []


def test_ls_and_show(ask, keys):
    (namespace,) = ask("ls")["namespaces"]
    assert (namespace["name"], namespace["blocks"], namespace["spec"]["model"]) == ("prompts", BLOCKS, "smol")
    assert {block["key"] for block in ask("ls", "prompts")["blocks"]} == {key.hex() for key in keys}
    block = ask("show", keys[1].hex()[:8])["block"]
    assert (block["key"], block["parent"], block["state"]) == (keys[1].hex(), keys[0].hex(), "ready")


def test_match_and_why_of_tokens(ask, run, keys, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(TOKENS))
    found = ask("match", "--tokens", f"@{tmp_path}/ids.json")
    assert (found["matched"], found["blocks"], found["tokens"]) == (BLOCKS, BLOCKS, len(TOKENS))
    assert ask("why", "--tokens", f"@{tmp_path}/ids.json")["matched"] == BLOCKS
    other = ",".join(str(token) for token in [*TOKENS[:128], 7, *TOKENS[129:]])
    answer = ask("why", "--tokens", other, code=Exit.NO)
    assert (answer["matched"], answer["reason"]) == (2, "never_stored")
    code, out, _ = run("why", "--tokens", other)
    assert code == Exit.NO
    assert "Block 2 of 4" in out


def test_why_names_the_field_that_differs(client, ask, spec, keys):
    other = NamespaceSpec(model="smol", revision="1", dtype="bfloat16", layers=2, kv_heads=1, head_dim=32)
    client.open_namespace(other, name="other dtype")
    answer = ask("why", "--tokens", ",".join(map(str, TOKENS)), "-n", "other dtype", code=Exit.NO)
    assert answer["matched"] == 0
    assert ["dtype"] in [near["fields"] for near in answer["near"]]


def test_leases_show_who_holds_what(client, ask, spec, keys):
    lease = client.grant_lease("reading", 60_000)
    assert client.hold(lease, spec.namespace_id, keys[:2]) == (True, True)
    (shown,) = [one for one in ask("leases")["leases"] if one["lease_id"] == lease]
    assert (shown["name"], shown["owner"], shown["holds"]) == ("reading", "tester", 2)
    assert "tester" in [session["owner"] for session in ask("leases")["sessions"]]
    client.release(lease)
    assert lease not in [one["lease_id"] for one in ask("leases")["leases"]]


def test_pin_keeps_and_unpin_lets_go(ask, run, keys):
    assert ask("pin", "system", keys[0].hex(), "-n", "prompts")["outcomes"] == ["hit"]
    # The whole of HOST is asked for: what is pinned stays, though it may also go from HOST where SSD has it.
    ask("evict", "--tier", "host", "--bytes", "32MiB")
    assert ask("match", keys[0].hex(), "-n", "prompts")["matched"] == 1
    assert ask("unpin", "system")["released"] == 1
    code, _, err = run("unpin", "system")
    assert code == Exit.NOT_FOUND
    assert "system" in err


def test_verify_reads_everything_back(ask, keys):
    answer = ask("verify")
    assert (answer["blocks"] >= BLOCKS, answer["bad"]) == (True, 0)


def test_a_directory_in_use_is_not_checked_offline(run, ask, keys):
    code, out, err = run("verify", "--offline", ask("du")["directory"])
    assert (code, out) == (Exit.REFUSED, "")
    assert "pid" in err


def test_a_closed_directory_is_checked_offline(run, tmp_path, spec):
    tier = SsdTier(str(tmp_path), SsdConfig(capacity_bytes=16 << 20))
    assert list(tier.recover()) == []
    tier.put_namespace(spec, NamespacePolicy(), "prompts")
    tier.close()
    code, out, _ = run("verify", "--offline", str(tmp_path))
    assert (code, out.splitlines()[0], len(out.splitlines()) > 2) == (Exit.OK, f"{tmp_path}: whole", True)
    assert run("verify", "--offline", str(tmp_path), "-n", "x")[0] == Exit.USAGE


def test_du_agrees_with_the_ledger(ask, keys):
    usage = ask("du")
    assert 0 < usage["ledger_bytes"] <= usage["cap_bytes"] == 64 << 20
    assert sum(segment["blocks"] for segment in usage["segments"]) >= BLOCKS


def test_compact_quarantine_and_drain(ask, keys):
    assert "bytes_freed" in ask("compact")
    assert ask("quarantine")["entries"] == []
    assert ask("drain")["draining"] is True
    assert ask("status")["draining"] is True
    ask("drain", "--resume")
    assert ask("status")["draining"] is False


def test_doctor_looks_at_the_daemons_folder(run, ask, keys, real_daemon):
    code, out, _ = run("doctor")
    assert code in (Exit.OK, Exit.NO)
    assert f"pid {real_daemon.pid}" in out
    assert out.count("nr_hugepages=") <= 1
    assert "takes direct reads and writes" in out


def test_wrong_names_are_told(run, keys):
    for words, code in {
        ("show", "ffffffff", "-n", "prompts"): Exit.NOT_FOUND,
        ("ls", "nobody"): Exit.NOT_FOUND,
        ("match", "--tokens", "1,2", "-n", "prompts"): Exit.USAGE,
        ("evict", "--tier", "host"): Exit.USAGE,
    }.items():
        found, out, err = run(*words)
        assert (found, out) == (code, ""), err
        assert err.startswith("kvctl: ")
