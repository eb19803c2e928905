"""``kvbench quality``: what each codec costs in predictions, on a model and texts that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from transformers.utils.logging import disable_progress_bar

from kvstore.core.errors import InvalidArgument
from kvstore.engine.quality import Quality, QualityProbe
from kvstore.engine.quality_codecs import BLOCK_TOKENS, CODECS
from kvstore.engine.text import TextCodec
from kvstore.tools.kvbench.report import Report, Table
from kvstore.tools.kvbench.rows import Row, number
from kvstore.tools.progress import Progress

TARGETS: Final = {"int8": {"KL": "<= 1.5e-4", "other argmax": "<= 0.7 %", "perplexity": "within 0.2 %"}}
UNITS: Final = {"KL": "nats", "other argmax": "%", "perplexity": "% more", "attention error": "relative"}
LIMIT: Final = "fp16"
"""The codec that the others are compared with: keeping K and V as a model in fp16 makes them."""


def run_quality(model: Path, texts: Sequence[Path], tokens: int, codecs: Sequence[str]) -> Report:
    """Each codec over the first ``tokens`` tokens of each text; none in ``codecs`` means all of them."""
    codecs = list(dict.fromkeys(codecs)) or list(CODECS)
    for codec in codecs:
        if codec not in CODECS:
            raise InvalidArgument("--codec", repr(codec), f"one of {', '.join(CODECS)}")
    text_codec = load_text(model)
    # All texts are read before the first is measured: a wrong name should not cost minutes.
    encoded = [(path.name, tokens_of(path, text_codec)[:tokens]) for path in texts]
    for name, ids in encoded:
        if len(ids) < 2 * BLOCK_TOKENS:
            raise InvalidArgument("TEXT", f"{name}: {len(ids)} tokens", f"{2 * BLOCK_TOKENS} tokens at least")
    disable_progress_bar()
    measured: list[tuple[str, list[Quality]]] = []
    with Progress() as progress:
        probe = QualityProbe.load(model)
        for name, ids in encoded:
            found = probe.measure(ids, codecs, lambda doing, name=name: progress.step(f"{name}: {doing}"))  # type: ignore[misc]
            measured.append((name, found))
    rows = [row for name, found in measured for row in rows_of(found, name)]
    return Report(rows, [table_of(measured, probe.kv_shape)])


def load_text(model: Path) -> TextCodec:
    """The tokenizer in a model's folder. Raises InvalidArgument where there is none."""
    if not (model / "tokenizer.json").is_file():
        raise InvalidArgument("--model", str(model), "a folder with a model and its tokenizer.json")
    return TextCodec.load(model)


def tokens_of(path: Path, codec: TextCodec) -> list[int]:
    """Token ids of a file. Raises InvalidArgument for one that cannot be read."""
    try:
        return codec.encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("TEXT", str(path), f"a readable UTF-8 file ({error})") from error


def rows_of(found: Sequence[Quality], text: str) -> list[Row]:
    """Four figures of each codec; the limit is what keeping K and V raw in fp16 costs, if that was measured too."""
    raw = next((one for one in found if one.codec == LIMIT), None)
    limits = None if raw is None else _figures(raw)
    return [
        Row(
            bench="quality",
            case=f"{one.codec}, {name}, {text}",
            value=value,
            unit=UNITS[name],
            limit=None if limits is None else limits[name],
            limit_unit=UNITS[name],
            limit_name="raw fp16",
            target=TARGETS.get(one.codec, {}).get(name, ""),
            conditions={"tokens": one.tokens, "coded": "every token of every layer", "compute": "fp32"},
        )
        for one in found
        for name, value in _figures(one).items()
    ]


def table_of(measured: Sequence[tuple[str, Sequence[Quality]]], kv_shape: tuple[int, int]) -> Table:
    """A line a text and codec, with the targets of int8 on top."""
    targets = TARGETS["int8"]
    rows = [("target", "int8", "", targets["KL"], ">= 99.3 %", "", targets["perplexity"], "")]
    for text, found in measured:
        for one in found:
            rows.append(
                (
                    text,
                    one.codec,
                    f"{CODECS[one.codec].share_of_fp16(*kv_shape):.1%}",
                    f"{one.kl:.2e}",
                    f"{one.same_argmax:.2%}",
                    f"{one.perplexity:.4f}",
                    f"{one.perplexity_change:+.3%}",
                    number(one.attention_error),
                )
            )
    titles = "Text|Codec|>Bytes of fp16|>KL, nats|>Same argmax|>Perplexity|>Against exact|>Attention error"
    words = "; ".join(f"{codec.name}: {codec.words}" for codec in CODECS.values() if codec.words != "raw")
    return Table("Predictions with K and V through a codec, against the same model exact in fp32", titles, rows, words)


def _figures(found: Quality) -> dict[str, float]:
    return {
        "KL": found.kl,
        "other argmax": (1 - found.same_argmax) * 100,
        "perplexity": found.perplexity_change * 100,
        "attention error": found.attention_error,
    }
