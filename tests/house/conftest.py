"""What the house rules look at: the project's own sources, parsed once."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS_OUTSIDE = ("kernels", "engine", "tools")


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, its text and tree, and the module name that imports use."""

    path: str
    text: str
    tree: ast.Module
    module: str

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")


def module_name(path: str) -> str:
    """``kernels/layout.py`` is imported as ``kvstore.kernels.layout``."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if parts[0] in ROOMS_OUTSIDE:
        parts.insert(0, "kvstore")
    return ".".join(parts)


def make_source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path), module_name(path))


def project_files(*suffixes: str) -> list[str]:
    """Files that git tracks or would track, symlinks and generated code apart."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return sorted(
        name
        for name in set(listed)
        if name.endswith(suffixes)
        and not name.startswith("kvstore/v1/")
        and (ROOT / name).is_file()
        and not (ROOT / name).is_symlink()
    )


@pytest.fixture(scope="session")
def files() -> Callable[..., list[str]]:
    return project_files


@pytest.fixture(scope="session")
def source() -> Callable[[str, str], Source]:
    """Makes a source of a text, so that each rule can be shown a breach."""
    return make_source


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """All Python files of the project, tests included."""
    return [make_source(name, (ROOT / name).read_text()) for name in project_files(".py")]


@pytest.fixture(scope="session")
def product(sources: list[Source]) -> list[Source]:
    """What is shipped: everything but tests."""
    return [item for item in sources if not item.is_test]
