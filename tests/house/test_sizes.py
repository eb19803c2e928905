"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70


def long_files(items) -> list[str]:
    return [f"{item.path}: {count} lines" for item in items if (count := item.text.count("\n")) > FILE_LINES_MAX]


def long_functions(item) -> list[str]:
    return [
        f"{item.path}:{node.lineno}: {node.name} has {size} lines"
        for node in ast.walk(item.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def test_files_are_short(sources):
    assert long_files(sources) == []


def test_functions_are_short(product):
    assert [text for item in product for text in long_functions(item)] == []


def test_native_files_are_short(root, files):
    lines = {name: (root / name).read_text().count("\n") for name in files(".cpp", ".h", ".hpp", ".proto")}
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_rules_find_breaches(source):
    assert len(long_files([source("tools/x.py", "x = 1\n" * 401)])) == 1
    assert long_files([source("tools/x.py", "x = 1\n" * 400)]) == []
    assert len(long_functions(source("tools/x.py", "def f():\n" + "    x = 1\n" * 70))) == 1
    assert long_functions(source("tools/x.py", "def f():\n" + "    x = 1\n" * 69)) == []
