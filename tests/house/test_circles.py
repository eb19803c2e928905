"""No module imports itself through others: the graph of imports has no circle, those inside functions included.

Imports that only a type checker makes are left out: a part may name the type of the whole that holds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.house.test_imports import imported
from tests.house.test_manners import dotted


def graph(items: Iterable) -> dict[str, set[str]]:
    """Module: modules that it imports. A package's ``__init__`` is the package's own name, and no edge of its modules'
    imports from it by full path."""
    given = list(items)
    known = {item.module for item in given}
    edges: dict[str, set[str]] = {name: set() for name in known}
    for item in given:
        skipped = typing_lines(item.tree)
        for line, name in imported(item):
            if line in skipped:
                continue
            target = name if name in known else name.rpartition(".")[0]
            if target in known and target != item.module:
                edges[item.module].add(target)
    return edges


def typing_lines(tree: ast.Module) -> set[int]:
    """Lines of the blocks under ``if TYPE_CHECKING``."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and dotted(n.test).endswith("TYPE_CHECKING")]
    return {line for n in blocks for part in n.body for line in range(part.lineno, (part.end_lineno or 0) + 1)}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A circle, first module again at its end; empty if there is none."""
    done: set[str] = set()
    for start in sorted(edges):
        path: list[str] = []
        stack = [(start, iter(sorted(edges[start])))] if start not in done else []
        if stack:
            path.append(start)
        while stack:
            following = next(stack[-1][1], None)
            if following is None:
                done.add(stack.pop()[0])
                path.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                stack.append((following, iter(sorted(edges[following]))))
                path.append(following)
    return []


def test_imports_go_in_no_circle(product):
    assert " -> ".join(circle(graph(product))) == ""


def test_a_circle_is_found(source):
    texts = {
        "kvstore/store/a.py": "from kvstore.store import b",
        "kvstore/store/b.py": "def f():\n    from kvstore.store.c import x",
        "kvstore/store/c.py": "import kvstore.store.a",
        "kvstore/store/d.py": "from kvstore.store import a",
    }
    found = circle(graph([source(path, text) for path, text in texts.items()]))
    assert found == ["kvstore.store.a", "kvstore.store.b", "kvstore.store.c", "kvstore.store.a"]
    texts["kvstore/store/c.py"] = (
        "import json\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvstore.store.a"
    )
    assert circle(graph([source(path, text) for path, text in texts.items()])) == []
