"""The catalog's two files: how they are read, how a namespace is added and how forgotten.

``catalog.py`` says what is in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import numpy as np

from kvstore.core.errors import TierUnavailable
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import NamespaceId
from kvstore.tiers.ssd.catalog import CATALOG_COPY, CATALOG_NAME, Space, make_space, pack_catalog, pack_space
from kvstore.tiers.ssd.commit import Committer
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.files import append_file, read_file, write_file
from kvstore.tiers.ssd.table import NO_ROW

CATALOG_FILES: Final = (CATALOG_NAME, CATALOG_COPY)

EMPTY_MAX: Final = 1024
"""Namespaces without a block that are kept, for their names and policies: those that were put last."""


def read_catalog(core: Core, names: Collection[str]) -> tuple[bytes, bytes | None]:
    """The bytes of both files; None for a copy that is not there."""
    data = read_file(core.port, CATALOG_NAME) if CATALOG_NAME in names else b""
    return data, read_file(core.port, CATALOG_COPY) if CATALOG_COPY in names else None


def catalog_bytes(core: Core, names: Collection[str]) -> int | None:
    """Bytes that both files have; None if they are not alike, and have to be written anew before lines are added."""
    sizes = {core.port.stat(name).size if name in names else -1 for name in CATALOG_FILES}
    return sizes.pop() if len(sizes) == 1 else None


def put_space(core: Core, committer: Committer, spec: NamespaceSpec, policy: NamespacePolicy, name: str) -> None:
    """See ``DiskTier.put_namespace``. Now and then those of which nothing is left make room, so that the tables, the
    files and the indices are bounded by what is in use and not by what ever was."""
    with core.growth:
        with core.lock:
            namespace_id = spec.namespace_id
            known = core.space_index.get(namespace_id)
            if known is not None:
                # Behind the others: those that were put last are kept longest.
                core.space_index[namespace_id] = core.space_index.pop(namespace_id)
                space = make_space(known, spec, policy, name)
                if core.spaces[known] == space:
                    return
        if known is None:
            if len(core.space_index) >= max(core.spaces_look, 2 * EMPTY_MAX):
                _forget_unused(core, committer)
            index = core.free_spaces[-1] if core.free_spaces else len(core.spaces)
            space = make_space(index, spec, policy, name)
        core.call("namespaces", lambda: _keep_space(core, space))
        with core.lock:
            core.spaces = [*core.spaces[: space.index], space, *core.spaces[space.index + 1 :]]
            core.space_index[namespace_id] = space.index
            if known is None and core.free_spaces:
                core.free_spaces.pop()


def _keep_space(core: Core, space: Space) -> None:
    """Make a namespace durable in both files, the first before the second. ``growth`` is held, so one at a time."""
    if core.catalog_bytes is None:
        write_catalog(core, [*(one for one in core.known_spaces() if one.index != space.index), space])
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


def forget_empty(core: Core) -> int:
    """At a start: forget the namespaces that have no block any more, but for the last few; returns how many.

    A tenant each salt is normal use, and what was ever stored would else be read at every start. The caller writes the
    catalog anew.
    """
    empty = _empty(core)
    _forget(core, empty)
    return len(empty)


def _forget_unused(core: Core, committer: Committer) -> None:
    """The same while running, once most are empty. ``growth`` is held; a failure leaves it for later.

    What is forgotten is in no table and in no write under way, and the drops of its blocks are durable: no record names
    it that a start would have to explain. Then its index may be another's.
    """
    with core.lock:
        empty = _empty(core)
        core.spaces_look = 2 * len(core.space_index)
        core.spaces_written.clear()
    if 2 * len(empty) < len(core.space_index):
        return
    try:
        committer.settle()
        with core.lock:
            still = set(_empty(core)) - core.spaces_written
            _forget(core, [one for one in empty if one in still])
            core.spaces_look = 2 * len(core.space_index)
        core.call("namespaces", lambda: write_catalog(core, core.known_spaces()))
    except TierUnavailable as error:
        log.warning("namespaces without a block stay in the catalog: %s", error.message)


def _empty(core: Core) -> list[NamespaceId]:
    """Namespaces that nothing on disk is of and nothing under way, but for those that were put last."""
    table = core.table
    rows = np.array(table.extent_space, dtype=np.uint32)[np.array(table.extent_segment, dtype=np.uint32) != NO_ROW]
    used = set(np.unique(rows).tolist()).union(core.spaces_used)
    empty = [namespace_id for namespace_id, index in core.space_index.items() if index not in used]
    return empty[: max(0, len(empty) - EMPTY_MAX)]


def _forget(core: Core, namespaces: Iterable[NamespaceId]) -> None:
    """Give their indices back. The lock is held, or nothing else runs yet."""
    gone = [core.space_index.pop(one) for one in namespaces]
    if not gone:
        return
    core.catalog_bytes = None
    core.free_spaces += gone
    # Until a free index is used again the space of another stands there, so that the forgotten one takes no memory.
    known = {index: core.spaces[index] for index in core.space_index.values()}
    other = next(iter(known.values()), core.spaces[0])
    core.spaces = [known.get(index, other) for index in range(len(core.spaces))]
    core.forget_shares()
