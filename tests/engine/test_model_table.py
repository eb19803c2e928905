"""The table of families: some of each kind by default, all when asked for; each is right, or refused."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvstore.engine.model_table import Row, table, try_family

KINDS = {
    "gpt2": "served", "gpt_bigcode": "served", "opt": "served", "stablelm": "served", "mixtral": "served",
    "gpt_oss": "served", "cohere2": "served", "modernbert-decoder": "served", "bloom": "refused", "mamba": "refused",
    "deepseek_v3": "refused", "phimoe": "refused", "diffllama": "refused",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(set(KINDS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
def test_a_family_of_each_kind(family: str) -> None:
    row = try_family(family)
    assert (row.state, "\n" in row.why) == (KINDS[family], False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_family_is_wrong() -> None:
    rows = [try_family(family) for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    assert [row for row in rows if row.state == "wrong"] == []
    assert sum(row.state != "not built" for row in rows) >= 40


def test_the_page_says_what_was_found() -> None:
    page = table(
        [Row("a", "served"), Row("b", "refused", "model is b; expected one that fits"), Row("c", "wrong", "x")]
    )
    assert "3 families" in page
    assert "`a`." in page
    assert "| `b` | one that fits |" in page
