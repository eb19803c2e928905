"""``kvbench quality``: what each codec costs in predictions, on a model and a text that the user names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.engine.quality import BLOCK_TOKENS, Quality, QualityProbe
from kvstore.engine.text import TextCodec
from kvstore.tools.kvbench.rows import Row

TARGETS: Final = {"int8": {"KL": "<= 1.5e-4", "other argmax": "<= 0.7 %", "perplexity": "within 0.2 %"}}


def run_quality(model: Path, texts: list[Path], tokens: int) -> list[Row]:
    """Rows of each codec over the first ``tokens`` tokens of each text, beside raw fp16 in the same run."""
    if not (model / "tokenizer.json").is_file():
        raise InvalidArgument("--model", str(model), "a folder with a model and its tokenizer.json")
    codec, probe = TextCodec.load(model), QualityProbe.load(model)
    rows = []
    for path in texts:
        try:
            ids = codec.encode(path.read_text(encoding="utf-8"))[:tokens]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument("TEXT", str(path), f"a readable UTF-8 file ({error})") from error
        if len(ids) < 2 * BLOCK_TOKENS:
            raise InvalidArgument("TEXT", f"{path}: {len(ids)} tokens", f"{2 * BLOCK_TOKENS} tokens at least")
        found = probe.measure(ids)
        rows += [row for one in found for row in rows_of(one, found[0], path.name)]
    return rows


def rows_of(found: Quality, raw: Quality, text: str) -> list[Row]:
    """Four figures of one codec; the limit is what keeping K and V raw in fp16 costs."""
    figures = {
        "KL": (found.kl, raw.kl, "nats"),
        "other argmax": ((1 - found.same_argmax) * 100, (1 - raw.same_argmax) * 100, "%"),
        "perplexity": (found.perplexity_change * 100, raw.perplexity_change * 100, "% more"),
        "attention error": (found.attention_error, raw.attention_error, "relative"),
    }
    return [
        Row(
            bench="quality",
            case=f"{found.codec}, {name}, {text}",
            value=value,
            unit=unit,
            limit=limit,
            limit_unit=unit,
            limit_name="raw fp16",
            target=TARGETS.get(found.codec, {}).get(name, ""),
            conditions={"tokens": found.tokens, "coded": "every token of every layer", "compute": "fp32"},
        )
        for name, (value, limit, unit) in figures.items()
    ]
