"""Which form of the index a store has: the native one where it can be, else the one in Python. Chosen once a store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.core.types import Tier
from kvstore.kernels import native
from kvstore.store.columns.index import BlockIndex
from kvstore.store.columns.native import NativeIndex

log = logging.getLogger(__name__)

FORMS: Final[dict[str, type[BlockIndex]]] = {form.form: form for form in (NativeIndex, BlockIndex)}
"""By the names that status and ``kvctl doctor`` use."""

_only: list[str] = []


def make_index(tiers: Iterable[Tier], mapped_slots: int = 0) -> BlockIndex:
    """An empty index. Native, unless the extension is absent or the system refuses the address space: the log says.

    ``mapped_slots``: a native one holds at most so many, and other processes may map it; 0: they may not.
    """
    if _only:
        return FORMS[_only[-1]](tiers)
    reason = native.native_status().reason
    if reason is None:
        try:
            return NativeIndex(tiers, mapped_slots=mapped_slots)
        except MemoryError:
            reason = "the system gives no address space for its columns"
    log.warning("the index of blocks is the one in Python, which takes longer and more memory: %s", reason)
    return BlockIndex(tiers)


@contextmanager
def only(form: str) -> Iterator[None]:
    """Make this form and no other meanwhile: for tests of both. KeyError for a name that is not in FORMS."""
    _only.append(FORMS[form].form)
    try:
        yield
    finally:
        _only.pop()
