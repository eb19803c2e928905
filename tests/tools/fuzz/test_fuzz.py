"""Fuzz: its mutations are wrong in every way that it promises, and a short run over both transports finds nothing."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from google.protobuf.message import DecodeError

from kvstore.rpc.table import METHODS
from kvstore.tools.fuzz.mutate import DEEP, mutated


def test_mutations_keep_some_messages_right_and_make_most_wrong():
    rng = random.Random(1)
    right = METHODS["kvstore.v1.Cache/Match"].request(namespace_id=bytes(32), keys=bytes(64))
    same = broken = 0
    for _ in range(1000):
        data = mutated(rng, right)
        same += data == right.SerializeToString()
        try:
            type(right).FromString(data)
        except DecodeError:
            broken += 1
    assert 20 < same < 400
    assert broken > 20


def test_fields_at_any_depth_get_nested_json_and_huge_counts():
    rng = random.Random(2)
    kind = METHODS["kvstore.v1.Cache/OpenNamespace"].request
    right = kind()
    right.spec.model = "m"
    assert any(DEEP.encode() in mutated(rng, right) for _ in range(3000))
    commit = METHODS["kvstore.v1.Cache/Commit"].request(reservation_ids=[1], keys=bytes(32), parents=bytes(32))
    assert any(len(mutated(rng, commit)) > 4000 for _ in range(500))


def run(*arguments):
    command = [sys.executable, "-m", "kvstore.tools.fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)


def test_a_short_run_finds_nothing(tmp_path):
    ran = run("--messages", "2000", "--seed", "1", "--save", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_long_run_finds_nothing(tmp_path):
    ran = run("--messages", "100000", "--seed", "2", "--save", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
