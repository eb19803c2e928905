"""The checker of chaos: it takes right bytes for right, finds wrong ones, and ends with its report."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.core.types import Outcome
from kvstore.tools.chaos.ground import Findings, Tenant, chain

HIT, MISS = Outcome.HIT, Outcome.MISS


def test_bytes_follow_from_namespace_and_key():
    mine, other = Tenant.of(1), Tenant.of(2)
    keys = chain("x", 3)
    assert len({tenant.payload(key) for tenant in (mine, other) for key in keys}) == 6
    assert mine.wrong(keys, [HIT] * 3, [mine.payload(key) for key in keys]) == []


def test_wrong_bytes_are_found_wherever_they_come_from():
    mine, other = Tenant.of(1), Tenant.of(2)
    keys = chain("x", 4)
    swapped = [mine.payload(keys[1]), other.payload(keys[1]), None, mine.payload(keys[3])[:-1] + b"?"]
    assert mine.wrong(keys, [HIT, HIT, MISS, HIT], swapped) == [0, 1, 3]


def test_a_finding_keeps_its_first_words_and_counts():
    findings = Findings()
    findings.add("leak: pins", "first", 2)
    findings.add("leak: pins", "second")
    assert findings.counts == {"leak: pins": 3}
    assert findings.first == {"leak: pins": "first"}


def run(*arguments):
    command = [sys.executable, "-m", "kvstore.tools.chaos", "--minutes", "1", "--seed", "3", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_one_round_of_tenants_with_equal_keys():
    ran = run("--only", "equal-keys", "--rounds", "1")
    assert "1 rounds" in ran.stdout
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_kind_that_is_none_is_refused():
    assert run("--only", "nothing").returncode == 2


@pytest.mark.slow
def test_every_kind_of_trouble_once():
    ran = run("--minutes", "10", "--rounds", "14")
    assert ran.returncode == 0, ran.stdout + ran.stderr
