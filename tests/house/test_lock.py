"""Whoever needs the store's lock takes the proof of it: the ``Book`` that ``State.locked()`` answers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

STORE = Path("kvstore/store")
FILES = sorted(STORE.rglob("*.py"))


def functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def test_a_function_that_says_lock_held_takes_its_proof():
    bare = [
        f"{path}: {node.name}"
        for path, node in functions()
        if re.search(r"\block (is )?held", ast.get_docstring(node) or "", re.IGNORECASE)
        and not {"book", "finish"} & {argument.arg for argument in node.args.args}
    ]
    assert bare == []


def test_nobody_reaches_the_book_without_the_lock():
    """mypy holds the rest: a section's ``book`` is the only one there is."""
    reached = [
        f"{path}: {node.attr}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"unproven", "_book"} and path.name != "state.py"
    ]
    # One choice has its own; ``match`` takes the lock itself, which spares it two calls.
    own = [found for found in reached if not found.startswith(f"{STORE}/moves/victims.py: _book")]
    assert own == [f"{STORE}/verbs/get.py: unproven"]
