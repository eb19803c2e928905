"""Where tokens come from, and what wrong ones are answered."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.tools.kvctl.tokens import TokenSource, parse_keys, parse_tokens


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", " [1, 2, 3]\n", "1, 2,\n3", "[1,2,3]"])
def test_lists(text):
    assert parse_tokens(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["1,x", "[1, 2", "-1", "4294967296", "[1.5]", "[true]", '["1"]', "[[1]]"])
def test_wrong_tokens_are_named(text):
    with pytest.raises(InvalidArgument) as caught:
        parse_tokens(text)
    assert caught.value.field.startswith("--tokens")


def test_a_file_of_tokens(tmp_path):
    (tmp_path / "t.json").write_text("[5, 6]")
    assert TokenSource(tokens=f"@{tmp_path}/t.json").read() == [5, 6]
    with pytest.raises(InvalidArgument, match="readable"):
        TokenSource(tokens=f"@{tmp_path}/none").read()


def test_exactly_one_source():
    for source in (TokenSource(), TokenSource(tokens="1", text="a")):
        with pytest.raises(InvalidArgument, match="one of them"):
            source.read()


def test_a_text_and_a_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 9, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "prompt.txt").write_text("b b a")
    assert TokenSource(text="a b c", model=str(tmp_path)).read() == [3, 9, 0]
    assert TokenSource(text=f"@{tmp_path}/prompt.txt", model=str(tmp_path / "tokenizer.json")).read() == [9, 9, 3]


def test_a_text_needs_a_model(tmp_path):
    with pytest.raises(InvalidArgument, match="--model is not given"):
        TokenSource(text="a").read()
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        TokenSource(text="a", model=str(tmp_path)).read()


def test_keys():
    assert parse_keys(["00010203", "ab" * 32]) == [bytes(range(4)), b"\xab" * 32]
    for wrong in ("0001", "000", "xyzw0000", "00" * 33):
        with pytest.raises(InvalidArgument) as caught:
            parse_keys([wrong])
        assert caught.value.field == "KEY"
