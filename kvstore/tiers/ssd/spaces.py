"""The catalog's two files: how they are read, and how a namespace is added. ``catalog.py`` says what is in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import numpy as np

from kvstore.tiers.ssd.catalog import CATALOG_COPY, CATALOG_NAME, Space, pack_catalog, pack_space
from kvstore.tiers.ssd.core import Core
from kvstore.tiers.ssd.files import append_file, read_file, write_file

CATALOG_FILES: Final = (CATALOG_NAME, CATALOG_COPY)

EMPTY_MAX: Final = 1024
"""Namespaces without a block that a start keeps, for their names and policies: those that were added last."""


def read_catalog(core: Core, names: Collection[str]) -> tuple[bytes, bytes | None]:
    """The bytes of both files; None for a copy that is not there."""
    data = read_file(core.port, CATALOG_NAME) if CATALOG_NAME in names else b""
    return data, read_file(core.port, CATALOG_COPY) if CATALOG_COPY in names else None


def catalog_bytes(core: Core, names: Collection[str]) -> int | None:
    """Bytes that both files have; None if they are not alike, and have to be written anew before lines are added."""
    sizes = {core.port.stat(name).size if name in names else -1 for name in CATALOG_FILES}
    return sizes.pop() if len(sizes) == 1 else None


def keep_space(core: Core, spaces: list[Space], space: Space) -> None:
    """Make a namespace durable in both files, the first before the second. ``growth`` is held, so one at a time."""
    if core.catalog_bytes is None:
        write_catalog(core, spaces)
        return
    line = pack_space(space)
    at, core.catalog_bytes = core.catalog_bytes, None
    for name in CATALOG_FILES:
        append_file(core, name, at, line)
    core.catalog_bytes = at + len(line)


def write_catalog(core: Core, spaces: Iterable[Space]) -> None:
    """Write both files anew, one after the other. ``growth`` is held, or nothing else runs yet."""
    core.catalog_bytes = None
    whole = pack_catalog(spaces)
    for name in CATALOG_FILES:
        write_file(core, name, [whole])
    core.catalog_bytes = len(whole)


def forget_empty(core: Core) -> None:
    """At a start: leave the namespaces that have no block any more, but for the last few, out of the files.

    A tenant each salt is normal use, and what was ever stored would else be read at every start.
    """
    rows = np.array(core.table.extent_space, dtype=np.int64)[np.array(core.table.extent_live, dtype=np.int64) > 0]
    used = set(np.unique(rows).tolist())
    empty = [space.index for space in core.spaces if space.index not in used]
    if len(empty) > EMPTY_MAX:
        gone = set(empty[:-EMPTY_MAX])
        write_catalog(core, [space for space in core.spaces if space.index not in gone])
