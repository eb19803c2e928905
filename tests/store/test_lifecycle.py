"""The life cycle is exactly its table."""

from __future__ import annotations

import itertools

import pytest

from kvstore.core.types import Tier
from kvstore.store.columns.lifecycle import TRANSITIONS, Copy, CopyState, Event, IllegalTransition, after

LEGAL = """
absent reserve reserved
absent fill filling
reserved abort absent
reserved fill filling
reserved seal ready
filling seal ready
filling fail absent
filling doom doomed
ready drop absent
ready doom doomed
doomed drain absent
"""


def test_the_table_is_the_one_that_was_agreed():
    rows = {(s.value, e.value, to.value) for (s, e), to in TRANSITIONS.items()}
    assert rows == {tuple(line.split()) for line in LEGAL.split("\n") if line}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(CopyState, Event)))
def test_every_state_and_event(state, event):
    copy = Copy(Tier.HOST, 4096, state, 8192)
    if (state, event) in TRANSITIONS:
        copy.advance(event)
        assert copy.state is TRANSITIONS[state, event] is after(state, event)
    else:
        with pytest.raises(IllegalTransition, match=f"event {event.value} in state {state.value}"):
            copy.advance(event)
        assert copy == Copy(Tier.HOST, 4096, state, 8192)


def test_every_state_is_reached_and_left():
    assert set(TRANSITIONS.values()) == set(CopyState)
    assert {state for state, _ in TRANSITIONS} == set(CopyState)
