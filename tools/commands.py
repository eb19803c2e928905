"""The console scripts: each starts its command, or says in one line which extra of the package is missing."""

from __future__ import annotations

import sys
from importlib import import_module


def kvstored() -> None:
    """The daemon."""
    _start("kvstored", "kvstore.daemon.main", "daemon")


def kvctl() -> None:
    """The operator's command."""
    _start("kvctl", "kvstore.tools.kvctl.main", "cli")


def kvengine() -> None:
    """The engine."""
    _start("kvengine", "kvstore.tools.kvengine.main", "engine")


def kvbench() -> None:
    """The benchmarks; those of attention and codecs need ``engine`` beside it."""
    _start("kvbench", "kvstore.tools.kvbench.main", "daemon")


def _start(command: str, module: str, extra: str) -> None:
    try:
        import_module(module).main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "kvstore"):
            raise
        sys.exit(f"{command}: {missing} is not installed: pip install 'tiered-kvstore[{extra}]'")
