"""Imports go one way; heavy packages stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

RANK = {
    "kernels": 0,
    "core": 1,
    "tiers": 2,
    "cache": 3,
    "store": 4,
    "v1": 4,
    "wire": 5,
    "testing": 5,
    "rpc": 6,
    "client": 7,
    "daemon": 7,
    "adapters": 8,
    "engine": 8,
    "tools": 9,
}
"""A room may import rooms of a lower rank and itself. Generated messages (v1) rank above the store: it knows none."""

DEVICE_TIER = ("kvstore.tiers.device", "kvstore.tiers.cuda")

CONFINED = {
    "torch": ("kvstore.kernels", "kvstore.engine", "kvstore.adapters", *DEVICE_TIER),
    "triton": ("kvstore.kernels",),
    "transformers": ("kvstore.engine", "kvstore.tools", "kvstore.adapters.transformers"),
    "grpc": ("kvstore.tools.fuzz", "kvstore.rpc", "kvstore.client", "kvstore.daemon", "kvstore.v1"),
    "grpc_health": ("kvstore.daemon", "kvstore.rpc"),
    "grpc_reflection": ("kvstore.daemon", "kvstore.rpc"),
    "pickle": (),
    "marshal": (),
    "shelve": (),
    "kernels": (),
    "engine": (),
    "tools": (),
}
"""Top-level package: where it may be imported. Nothing is ever unpickled; the bare room names are other people's."""


def imported(item) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a source imports, wherever it does so."""
    package = item.module if item.is_package else item.module.rpartition(".")[0]
    for node in ast.walk(item.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "kvstore" and parts[1] in RANK else None


def order_breaches(item) -> list[str]:
    mine = room(item.module)
    found = []
    for line, name in imported(item):
        theirs = room(name)
        if mine is None:
            if theirs is not None and item.module.startswith("kvstore"):
                found.append(f"{item.path}:{line}: the root package imports {name}")
        elif theirs is not None and theirs != mine and RANK[theirs] >= RANK[mine]:
            found.append(f"{item.path}:{line}: {mine} imports {name}")
    return found


def confined_breaches(item) -> list[str]:
    found = []
    for line, name in imported(item):
        allowed = CONFINED.get(name.split(".")[0])
        if allowed is not None and not item.module.startswith(allowed):
            found.append(f"{item.path}:{line}: {name} is not for {item.module}")
    return found


def test_rooms_import_only_rooms_below_them(product):
    assert [text for item in product for text in order_breaches(item)] == []


def test_heavy_packages_stay_in_their_rooms(product):
    assert [text for item in product for text in confined_breaches(item)] == []


def test_every_room_has_a_rank(product):
    rooms = {
        item.module.split(".")[1]
        for item in product
        if item.module.count(".") >= 1 and item.module.startswith("kvstore.")
    }
    assert rooms <= set(RANK)


def test_order_rule_finds_breaches(source):
    for path, text in {
        "kvstore/store/x.py": "import kvstore.client.api",
        "kvstore/core/x.py": "from kvstore import tiers",
        "kernels/x.py": "def f():\n    from kvstore.core import keys",
        "kvstore/client/x.py": "from kvstore.daemon.config import Config",
        "kvstore/tiers/x.py": "from ..store import api",
        "kvstore/__init__.py": "from kvstore.core import types",
    }.items():
        assert len(order_breaches(source(path, text))) == 1, path
    for path, text in {
        "engine/x.py": "from kvstore.client import Client\nfrom kvstore.engine.sampler import Sampler",
        "kvstore/core/x.py": "from kvstore.kernels.layout import align_up",
        "kvstore/rpc/__init__.py": "from .codec import encode",
    }.items():
        assert order_breaches(source(path, text)) == [], path


def test_confinement_rule_finds_breaches(source):
    assert len(confined_breaches(source("kvstore/store/x.py", "import torch.nn\nfrom grpc import aio"))) == 2
    assert len(confined_breaches(source("tools/x.py", "import pickle\nimport grpc\nfrom kernels import layout"))) == 3
    assert confined_breaches(source("kvstore/tiers/device_cuda.py", "import torch")) == []


def test_package_root_and_core_import_no_heavy_package():
    code = "import sys, kvstore.core.types; print(sorted({'grpc', 'torch', 'numpy', 'google'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
