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
from kvstore.tools.kvbench.rows import Row
from kvstore.tools.progress import Progress

TARGETS: Final = {"int8": {"KL": "<= 1.5e-4", "other argmax": "<= 0.7 %", "perplexity": "within 0.2 %"}}
LIMIT: Final = "fp16"
"""The codec that the others are compared with: keeping K and V as a model in fp16 makes them."""


def run_quality(model: Path, texts: Sequence[Path], tokens: int, codecs: Sequence[str]) -> list[Row]:
    """Rows of each codec over the first ``tokens`` tokens of each text; none in ``codecs`` means all of them."""
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
    rows = []
    with Progress() as progress:
        probe = QualityProbe.load(model)
        for name, ids in encoded:
            found = probe.measure(ids, codecs, lambda doing, name=name: progress.step(f"{name}: {doing}"))  # type: ignore[misc]
            raw = next((one for one in found if one.codec == LIMIT), None)
            rows += [row for one in found for row in rows_of(one, raw, name)]
    return rows


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


def rows_of(found: Quality, raw: Quality | None, text: str) -> list[Row]:
    """Four figures of one codec; the limit is what keeping K and V raw in fp16 costs, if that was measured too."""
    rows = []
    for name, unit in (
        ("KL", "nats"),
        ("other argmax", "%"),
        ("perplexity", "% more"),
        ("attention error", "relative"),
    ):
        rows.append(
            Row(
                bench="quality",
                case=f"{found.codec}, {name}, {text}",
                value=_figure(found, name),
                unit=unit,
                limit=None if raw is None else _figure(raw, name),
                limit_unit=unit,
                limit_name="raw fp16",
                target=TARGETS.get(found.codec, {}).get(name, ""),
                conditions={"tokens": found.tokens, "coded": "every token of every layer", "compute": "fp32"},
            )
        )
    return rows


def _figure(found: Quality, name: str) -> float:
    figures = {
        "KL": found.kl,
        "other argmax": (1 - found.same_argmax) * 100,
        "perplexity": found.perplexity_change * 100,
        "attention error": found.attention_error,
    }
    return figures[name]
