"""Text as tokens arrive: characters over tokens, stop strings over tokens, nothing handed out too early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvstore.core.errors import InvalidArgument
from kvstore.engine.text import TextCodec, TextStream


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """Byte-level, one token a byte but for "ab": every string can be cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer)


def stream(codec: TextCodec, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    found = TextStream(codec, stop)
    pieces = []
    for token in codec.encode(text):
        pieces.append(found.add(token))
        if found.stopped:
            break
    pieces.append(found.finish())
    return pieces, found


@pytest.mark.parametrize("text", ["plain", "ab xab\n", "Grüße, 世界! 🙂🙂", " leading and trailing "])
def test_pieces_make_the_text(codec: TextCodec, text: str) -> None:
    pieces, found = stream(codec, text)
    assert "".join(pieces) == text
    assert not found.stopped
    assert "\ufffd" not in "".join(pieces)


def test_a_character_comes_with_its_last_byte(codec: TextCodec) -> None:
    pieces, _ = stream(codec, "ü🙂")
    assert pieces == ["", "ü", "", "", "", "🙂", ""]


def test_a_cut_character_comes_at_the_end(codec: TextCodec) -> None:
    found = TextStream(codec)
    assert [found.add(token) for token in codec.encode("x🙂")[:3]] == ["x", "", ""]
    assert found.finish() == "\ufffd"
    assert found.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello STOP more", ("STOP",), "hello "),
        ("one\n\ntwo", ("\n\n",), "one"),
        ("xxaby", ("xab",), "x"),
        ("xxaby", ("by",), "xxa"),
        ("aaab", ("aab", "zz"), "a"),
        ("first END then STOP", ("STOP", "END"), "first "),
        ("🙂 fin", ("🙂",), ""),
    ],
)
def test_stop_strings_end_the_text_before_them(
    codec: TextCodec, text: str, stop: tuple[str, ...], expected: str
) -> None:
    pieces, found = stream(codec, text, stop)
    assert found.stopped
    assert "".join(pieces) == expected


def test_the_start_of_a_stop_string_is_held_back_and_comes_if_it_was_none(codec: TextCodec) -> None:
    found = TextStream(codec, ("STOP",))
    assert [found.add(token) for token in codec.encode("xSTOx")] == ["x", "", "", "", "STOx"]
    unfinished, ended = stream(codec, "xSTO", ("STOP",))
    assert unfinished == ["x", "", "", "", "STO"]
    assert not ended.stopped


def test_a_folder_is_read_with_its_template(codec: TextCodec, tmp_path: Path) -> None:
    codec.tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    config = {"chat_template": template, "eos_token": {"content": ";"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = TextCodec.load(tmp_path)
    tokens = loaded.chat([{"role": "user", "content": "hi"}])
    assert loaded.decode(tokens) == "[user]hi;[assistant]"


def test_a_conversation_needs_a_template(codec: TextCodec) -> None:
    with pytest.raises(InvalidArgument, match="chat template"):
        codec.chat([{"role": "user", "content": "hi"}])
