"""Habits that a linter has no rule for."""

from __future__ import annotations

import ast
import re

ENVIRONMENT_READER = "kvstore/daemon/config.py"
"""The one file that may look at environment variables; everything else is told."""

ENVIRONMENT_OPTION = "tools/kvctl/command.py"
"""Has one option whose default a user may set once for a shell: the socket."""

BROAD = {"Exception", "BaseException"}
LEFT_TO_DO = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|opt/pypi)[/\w-]*")


def dotted(node: ast.AST) -> str:
    """``os.environ`` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def environment_uses(item) -> list[str]:
    found = []
    for node in ast.walk(item.tree):
        used = isinstance(node, ast.Attribute) and dotted(node) in {
            "os.environ",
            "os.getenv",
            "os.putenv",
            "os.environb",
        }
        used |= isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in a.name for a in node.names)
        used |= isinstance(node, ast.keyword) and node.arg == "envvar"
        if used:
            found.append(f"{item.path}:{getattr(node, 'lineno', 0)}: reads the environment")
    return found


def caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    nodes = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {dotted(node) for node in nodes}


def is_told(handler: ast.ExceptHandler) -> bool:
    """A handler tells if it raises, uses the exception, or calls a logger."""
    for node in ast.walk(ast.Module(body=handler.body, type_ignores=[])):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and handler.name and node.id == handler.name):
            return True
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in {"exception", "error", "warning"}:
            return True
    return False


def says_nothing(step: ast.stmt) -> bool:
    return isinstance(step, ast.Pass) or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))


def swallowed(item) -> list[str]:
    found = []
    for node in ast.walk(item.tree):
        if isinstance(node, ast.ExceptHandler):
            silent = all(says_nothing(step) for step in node.body)
            if silent or (caught(node) & BROAD and not is_told(node)):
                found.append(f"{item.path}:{node.lineno}: an exception is swallowed")
        suppresses = isinstance(node, ast.Call) and dotted(node.func) in {"suppress", "contextlib.suppress"}
        if suppresses and {dotted(argument) for argument in node.args} & BROAD:
            found.append(f"{item.path}:{node.lineno}: every exception is suppressed")
    return found


def asserts_and_stubs(item) -> list[str]:
    found = []
    for node in ast.walk(item.tree):
        if isinstance(node, ast.Assert):
            found.append(f"{item.path}:{node.lineno}: assert is no validation")
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if dotted(raised) == "NotImplementedError":
                found.append(f"{item.path}:{node.lineno}: a stub")
    return found


def sleeps(item) -> list[str]:
    return [
        f"{item.path}:{node.lineno}: a test waits for an event, not for time"
        for node in ast.walk(item.tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"time.sleep", "sleep", "asyncio.sleep"}
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]


def poor_docstring(item) -> list[str]:
    text = ast.get_docstring(item.tree) or ""
    wanted = 2 if item.is_package and item.module.count(".") == 1 and not item.module.endswith(".v1") else 1
    sentences = len(re.findall(r"[.:!?](?:\s|$)", text))
    return [] if sentences >= wanted else [f"{item.path}: opens with {sentences} sentences, not {wanted} or more"]


def test_only_the_configuration_reads_the_environment(product):
    readers = [item.path for item in product for _ in environment_uses(item)]
    assert [path for path in readers if path != ENVIRONMENT_READER] == [ENVIRONMENT_OPTION]


def test_no_exception_is_swallowed(product):
    assert [text for item in product for text in swallowed(item)] == []


def test_no_assert_and_no_stub_outside_tests(product):
    assert [text for item in product for text in asserts_and_stubs(item)] == []


def test_tests_do_not_sleep(sources):
    assert [text for item in sources if item.is_test for text in sleeps(item)] == []


def test_every_module_opens_with_a_docstring(product):
    modules = [item for item in product if item.text.strip()]
    assert [text for item in modules for text in poor_docstring(item)] == []


def test_every_package_has_an_init(product, root):
    folders = {item.path.rpartition("/")[0] for item in product if "/" in item.path}
    assert [folder for folder in sorted(folders) if not (root / folder / "__init__.py").is_file()] == []


def test_nothing_is_left_to_do_and_no_path_is_this_machine_s(root, files):
    found = []
    for name in files(".py", ".md", ".proto", ".cpp", ".h", ".toml", ".txt", ".yaml", "Makefile", ".ci/run"):
        if name.startswith("tests/house/") or name == "LICENSE":
            continue
        for number, line in enumerate((root / name).read_text().splitlines(), 1):
            if LEFT_TO_DO.search(line) or MACHINE_PATHS.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []


def test_rules_find_breaches(source):
    def count(rule, text, path="kvstore/store/x.py"):
        return len(rule(source(path, text)))

    assert count(environment_uses, "import os\nx = os.environ['A']\ny = os.getenv('B')") == 2
    assert count(environment_uses, "from os import environ") == 1
    assert count(environment_uses, "import typer\nx = typer.Option('', envvar='A')") == 1
    assert count(swallowed, "try:\n    f()\nexcept OSError:\n    pass") == 1
    assert count(swallowed, "try:\n    f()\nexcept Exception:\n    x = 1") == 1
    assert count(swallowed, "try:\n    f()\nexcept OSError:\n    ...") == 1
    assert count(swallowed, "try:\n    f()\nexcept:\n    x = 1") == 1
    assert count(swallowed, "with suppress(Exception):\n    f()") == 1
    assert count(swallowed, "try:\n    f()\nexcept Exception as error:\n    tell(error)") == 0
    assert count(swallowed, "try:\n    f()\nexcept Exception:\n    log.exception('f')") == 0
    assert count(swallowed, "try:\n    f()\nexcept OSError:\n    x = 1") == 0
    assert count(asserts_and_stubs, "assert x\nraise NotImplementedError('later')\nraise NotImplementedError") == 3
    assert count(sleeps, "time.sleep(0.1)\nawait_(asyncio.sleep(0))") == 1
    assert count(poor_docstring, '"""One."""', "kvstore/store/__init__.py") == 1
    assert count(poor_docstring, '"""One. Two."""', "kvstore/store/__init__.py") == 0
    assert count(poor_docstring, "x = 1") == 1
    assert LEFT_TO_DO.search("# TODO: more")
    assert MACHINE_PATHS.search("see /work/main/x")
    assert not MACHINE_PATHS.search("framework/mains and /proc/work/")
