"""Calls of the project's own functions in a put, a get, a match and a fetch stay at half of what they were."""

from __future__ import annotations

import pytest

from kvstore.kernels import native
from kvstore.tools.kvbench.calls import OWN_BEFORE, count_calls


@pytest.mark.skipif(not native.available(), reason="counts are those of the native index and copies")
def test_each_side_makes_half_of_the_calls_that_it_made():
    for name, (_, _, *own) in count_calls(rounds=12).items():
        most = [before // 2 for before in OWN_BEFORE[name]]
        assert all(count <= bound for count, bound in zip(own, most, strict=True)), (name, own, most)
