"""docs/protocol.md says what the code does: vectors, error table, bounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore.core.keys import chain_keys
from kvstore.core.namespace import NamespaceSpec
from kvstore.rpc.connection import CALLS_MAX
from kvstore.rpc.session_server import HELLO_SECONDS_MAX
from kvstore.rpc.stream_blocks import WRITE_BYTES_MAX
from kvstore.wire.errors import ERRORS, status_code
from kvstore.wire.framing import CHUNK_BYTES_MAX, FRAME_BYTES_MAX, FrameKind


@pytest.fixture(scope="module")
def text():
    return (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def cell(text, name):
    return re.search(rf"^\| {name} \| `(.*)` \|$", text, re.MULTILINE)[1]


def test_golden_vectors(text):
    fields = json.loads(cell(text, "spec"))
    spec = NamespaceSpec(**{**fields, "salt": bytes.fromhex(fields["salt"])})
    assert spec.namespace_id.hex() == cell(text, "its namespace id")
    keys = [key.hex() for key in chain_keys(spec.namespace_id, range(128), 64)]
    assert keys == [cell(text, "key of tokens 0 to 63"), cell(text, "key of the next 64 tokens of that chain")]


def test_every_reason_is_told_with_its_status(text):
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \((\d+)\) \|", text, re.MULTILINE)
    assert {(r, s, int(n)) for r, s, n in rows} == {
        (kind.reason, kind.status, status_code(kind.__new__(kind))) for kind in ERRORS
    }


def test_bounds_are_the_code_s(text):
    assert f"at most {FRAME_BYTES_MAX >> 20} MiB each" in text
    assert f"At most {CALLS_MAX} calls" in text
    assert f"within {HELLO_SECONDS_MAX:g} s" in text
    assert f"most {CHUNK_BYTES_MAX >> 20} MiB, each with its CRC-32C" in text
    assert f"at most {WRITE_BYTES_MAX >> 20} MiB, and nothing" in text
    kinds = re.search(r"^\| 1 \| kind: (.*) \|$", text, re.MULTILINE)[1]
    assert kinds == ", ".join(f"{kind.value} {kind.name.lower().replace('_', ' ')}" for kind in FrameKind)
