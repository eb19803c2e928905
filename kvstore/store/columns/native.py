"""The index in C++: the same columns, in memory that never moves, and the steps of calls without the interpreter.

``kernels/native/index.h`` holds it. What it means is said by ``index.BlockIndex``, whose methods these are; the order
in which ``blocks`` come is another one. Beside the columns it keeps the LRU lists of the tiers whose policy asks for
that (``eviction/native_lru.py``), so that a use or a pin of a block calls nothing in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from kvstore.core.types import TIERS_MAX, BlockKey, NamespaceId, Place, Tier
from kvstore.kernels import native
from kvstore.store.columns.index import BlockIndex
from kvstore.store.columns.steps import Asked, Entered, Forms, Found
from kvstore.tiers.versions import Versions

SLOTS_MAX: Final = 1 << 27


class NativeIndex(BlockIndex):
    """``BlockIndex`` whose columns and table are C++. RuntimeError without the extension, MemoryError where the system
    gives no address space for the columns (about 10 GiB, of which none is used at first)."""

    form: ClassVar[str] = "native"

    def __init__(self, tiers: Iterable[Tier] = tuple(Tier), *, mapped_slots: int = 0) -> None:
        """``mapped_slots``: hold at most so many, and let other processes map what they need to match; 0: do not."""
        self.tiers = tuple(tiers)
        self.core: Any = native.index(
            [int(tier) for tier in self.tiers], mapped_slots or SLOTS_MAX, shared=mapped_slots > 0
        )
        """The C++ object, for the lists."""
        self.fd = int(self.core.fd())
        self.parent, self.namespace = self._column("parent"), self._column("namespace")
        self.residency, self.codec = self._column("residency"), self._column("codec")
        self.depth, self.children = self._column("depth"), self._column("children")
        self.hits, self.last_use = self._column("hits"), self._column("last_use")
        self.place = [self._column("place", n).cast("B").cast("I" if n <= Tier.HOST else "i") for n in _NUMBERS]
        self.kids = [self._column("kids", n) for n in _NUMBERS]
        self.colder = [self._column("colder", n) for n in _NUMBERS]
        self.hotter = [self._column("hotter", n) for n in _NUMBERS]
        self._slots: list[_Slots] = []
        self._pins_view = _Pins(self.core)

    def _column(self, name: str, tier: int = 0) -> memoryview[int]:
        if name in _OF_TIERS and tier not in self.tiers:
            return memoryview(b"").cast("i")
        return memoryview(self.core.column(name, tier))

    def __len__(self) -> int:
        return len(self.core)

    @property
    def top(self) -> int:
        """See ``BlockIndex``."""
        return int(self.core.top())

    @property
    def pins(self) -> Mapping[int, int]:
        """See ``BlockIndex``."""
        return self._pins_view

    def keep_list(self, tier: Tier) -> None:
        """From now on uses and pins keep the LRU list of this tier; before the first slot."""
        self.core.keep_list(int(tier))
        self.listed |= {tier}

    def slots(self, namespace: int) -> Mapping[BlockKey, int]:
        """See ``BlockIndex``."""
        while namespace >= len(self._slots):
            self._slots.append(_Slots(self.core, len(self._slots)))
        return self._slots[namespace]

    def add(self, key: BlockKey, parent: int, namespace: int, depth: int) -> int:
        """See ``BlockIndex``. MemoryError above 134 million slots."""
        return int(self.core.add(key, parent, namespace, depth))

    def adopt(self, slot: int, parent: int, depth: int) -> None:
        """See ``BlockIndex``."""
        self.core.adopt(slot, parent, depth)

    def orphan(self, slot: int) -> None:
        """See ``BlockIndex``."""
        self.core.orphan(slot)

    def delete(self, slot: int) -> None:
        """See ``BlockIndex``."""
        self.core.delete(slot)

    def key_at(self, slot: int) -> BlockKey | None:
        """See ``BlockIndex``."""
        key: BlockKey | None = self.core.key_at(slot)
        return key

    def blocks(self, namespace: int = -1) -> list[tuple[int, BlockKey, int]]:
        """See ``BlockIndex``; in the order of slots."""
        found: list[tuple[int, BlockKey, int]] = self.core.blocks(namespace, 0, self.top)
        return found

    def with_prefix(self, prefix: bytes, begin: int, end: int) -> list[int]:
        """See ``BlockIndex``."""
        found: list[int] = self.core.with_prefix(prefix, begin, end)
        return found

    # -- steps of calls that have many keys ----------------------------------------------------------------------

    def match(self, namespace: int, keys: Sequence[BlockKey], readable: int) -> bytes:
        """See ``BlockIndex``."""
        found: bytes = self.core.match(namespace, keys, readable)
        return found

    def fetch(
        self,
        asked: Asked,
        keys: Sequence[BlockKey],
        pins: dict[int, None] | None,
        forms: Forms,
        versions: Sequence[Versions],
    ) -> Found:
        """See ``BlockIndex``."""
        return Found(*self.core.fetch(asked, keys, pins, forms, versions, Place))

    def enter(
        self, namespace: int, tier: Tier, names: tuple[list[BlockKey], list[BlockKey]], handles: list[int], kinds: bytes
    ) -> Entered:
        """See ``BlockIndex``."""
        return Entered(*self.core.enter(namespace, int(tier), names[0], names[1], handles, kinds))

    def note(self, slots: list[int], ticks: int) -> None:
        """See ``BlockIndex``."""
        self.core.note(slots, ticks)

    def know(self, namespace: int, sizes: Sequence[Sequence[int]]) -> None:
        """See ``BlockIndex``."""
        self.core.know(namespace, [number for row in sizes for number in row])

    def name(self, namespace: int, namespace_id: NamespaceId) -> None:
        """See ``BlockIndex``."""
        self.core.name(namespace, namespace_id)

    def set_readable(self, bits: int) -> None:
        """See ``BlockIndex``."""
        self.core.set_readable(bits)

    def set_kind(self, slot: int, kind: int) -> None:
        """See ``BlockIndex``."""
        self.core.set_kind(slot, kind)

    def pinned_bytes(self, tier: int) -> int:
        """See ``BlockIndex``."""
        return int(self.core.pinned_bytes(tier))

    def pin_all(self, numbers: list[int]) -> list[int]:
        """See ``BlockIndex``."""
        fresh: list[int] = self.core.pin_all(numbers)
        return fresh

    def unpin_all(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """See ``BlockIndex``."""
        left: tuple[list[int], list[int]] = self.core.unpin_all(numbers)
        return left


_NUMBERS = range(TIERS_MAX + 1)
_OF_TIERS = ("place", "kids", "colder", "hotter")


class _Slots(Mapping[BlockKey, int]):
    """Slots of one namespace by key."""

    def __init__(self, core: Any, namespace: int) -> None:
        self._core = core
        self._namespace = namespace
        self.get: Callable[..., Any] = core.finder(namespace)

    def __getitem__(self, key: BlockKey) -> int:
        slot = int(self.get(key))
        if slot < 0:
            raise KeyError(key)
        return slot

    def __iter__(self) -> Iterator[BlockKey]:
        return (key for _, key, _ in self._core.blocks(self._namespace, 0, self._core.top()))

    def __len__(self) -> int:
        return len(self._core.blocks(self._namespace, 0, self._core.top()))


class _Pins(Mapping[int, int]):
    """How often each pinned copy is pinned, by copy number."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getitem__(self, number: int) -> int:
        count = int(self._core.pins_of(number))
        if not count:
            raise KeyError(number)
        return count

    def __contains__(self, number: object) -> bool:
        return bool(self._core.pins_of(number))

    def __iter__(self) -> Iterator[int]:
        return iter(self._core.pinned())

    def __len__(self) -> int:
        return int(self._core.pinned_count())
