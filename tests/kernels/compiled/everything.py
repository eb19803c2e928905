"""The compile gate on every shipped variant; run by ``test_triton`` in a process of its own, in the slow suite."""

from __future__ import annotations

import pytest

from kvstore.kernels.compile_gate import TARGETS, all_variants, compile_variant

CASES = [(target, variant) for target in TARGETS for variant in all_variants(TARGETS[target].backend)]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "variant"), CASES, ids=[f"{target}-{variant.name}" for target, variant in CASES])
def test_variant_compiles(target: str, variant) -> None:
    assert compile_variant(variant, target).problems == []
