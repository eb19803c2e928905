"""The policy file: who it knows, what it gives, and every way in which it can be wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvstore.core.errors import InvalidArgument, Unauthenticated
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.rights import Right
from kvstore.rpc.access import EVERYTHING, Access, Grant, Policy


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def spec(model: str = "llama-8b", salt: bytes = b"") -> NamespaceSpec:
    return NamespaceSpec(model=model, dtype="float16", layers=2, kv_heads=1, head_dim=8, block_tokens=16, salt=salt)


FILE = f"""
[[allow]]
name = "team-a"
token_sha256 = ["{digest("a-token")}", "{digest("shared")}"]
uids = [54321]
namespaces = ["team-a/llama-*"]
roles = ["data-write"]

[[allow]]
name = "readers"
token_sha256 = ["{digest("shared")}"]
namespaces = ["-/*"]
roles = ["data-read"]

[[allow]]
name = "operators"
token_sha256 = ["{digest("op")}"]
namespaces = ["*/*"]
roles = ["admin"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("token", "asked", "right"),
    [
        ("a-token", spec(salt=b"team-a"), Right.WRITE),
        ("a-token", spec("qwen", b"team-a"), Right.NONE),
        ("a-token", spec(salt=b"team-b"), Right.NONE),
        ("a-token", spec(salt=b"team-a/llama-"), Right.NONE),
        ("a-token", spec(), Right.NONE),
        ("shared", spec(), Right.READ),
        ("shared", spec(salt=b"-x"), Right.NONE),
        ("shared", spec(salt=b"team-a"), Right.WRITE),
        ("op", spec(salt=b"team-a"), Right.NONE),
    ],
)
def test_a_token_gives_what_its_entries_give(file: Path, token: str, asked: NamespaceSpec, right: Right) -> None:
    grant = Access(file).of_bearer(f"Bearer {token}")
    assert grant.right(asked) is right
    assert grant.admin is (token == "op")


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer nobody", "a-token", "bearer a-token", "Bearer a-token "])
def test_a_header_that_is_not_known_opens_nothing(file: Path, header: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Access(file).of_bearer(header)
    assert "a-token" not in str(caught.value)


def test_users_of_this_host(file: Path) -> None:
    access = Access(file)
    assert access.of_uid(54321).right(spec(salt=b"team-a")) is Right.WRITE
    assert access.of_uid(54322) == Grant()
    assert access.of_uid(0) == EVERYTHING


def test_without_a_file_every_caller_has_data_rights() -> None:
    access = Access()
    assert not access.restricted
    assert access.of_bearer("").right(spec(salt=b"x")) is Right.WRITE
    assert access.of_uid(54321) == EVERYTHING


def test_a_file_that_is_wrong_leaves_the_one_before_in_force(file: Path) -> None:
    access = Access(file)
    file.write_text("nonsense")
    access.reload()
    assert access.of_bearer("Bearer a-token").right(spec(salt=b"team-a")) is Right.WRITE
    file.write_text(FILE.replace(digest("a-token"), digest("new")))
    access.reload()
    with pytest.raises(Unauthenticated):
        access.of_bearer("Bearer a-token")
    assert access.of_bearer("Bearer new").right(spec(salt=b"team-a")) is Right.WRITE


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[allow]]", "[allow]]", "TOML"),
        ('name = "team-a"', "secret = 1", "policy entry 1"),
        ('"data-write"', '"data-all"', "data-read, data-write, admin"),
        ('["team-a/llama-*"]', '["team-a"]', "TENANT/MODEL"),
        ('["team-a/llama-*"]', "[]", "at least one of each"),
        ("[54321]", '["root"]', "a list of numbers"),
        ("[54321]", "[true]", "a list of numbers"),
        (digest("op"), "op", "64 hexadecimal digits"),
        ('["*/*"]\nroles = ["admin"]', '["a/*"]\nroles = ["admin"]', "admin sees all"),
        ("\n[[allow]]", "\n[other]\nx = 1\n[[allow]]", "nothing else"),
    ],
)
def test_a_wrong_file_is_refused_with_its_entry(file: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(InvalidArgument, match=said.replace("*", r"\*")):
        Policy.read(file)


def test_a_file_that_others_may_write_is_refused(file: Path) -> None:
    file.chmod(0o666)
    with pytest.raises(InvalidArgument, match="only root or the daemon's user"):
        Policy.read(file)
    with pytest.raises(InvalidArgument, match="a UTF-8 file that can be read"):
        Policy.read(file.parent / "none")
