"""Whole payloads: what put takes, what get answers, and the steps between that need no connection.

A payload is a block's slices without padding, layer by layer. Those that put takes are raw, ``layers *
raw_slice_bytes`` bytes, since the daemon encodes; those that get answers are under the codec of the copy. Both clients
use these steps; they differ in how they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvstore.cache import CommitEntry, CommitResult, FetchResult
from kvstore.client.copying import Copies, as_bytes
from kvstore.client.steps import Copying
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import PAGE_BITS, BlockLayout
from kvstore.core.types import BATCH_KEYS_MAX, Area, BlockKey, Busy, Codec, Durability, Outcome, Reason, Tier

if TYPE_CHECKING:
    from kvstore.client.standing import Standing

PUT_PART_BYTES: Final = 32 << 20
"""Bytes that put writes before it has the daemon take them in. Writing and taking in overlap from one part to the next,
but each part costs a call with a hop to a thread: 16 blocks of 1 MiB took 4.9 ms in one part, 6.4 in two, 7.4 in 4."""

Memory = Callable[[Area], memoryview]

"""Versions are of pages of 4,096 bytes."""


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """Blocks to store: ``payloads[i]`` belongs to ``keys[i]``, whose parent is ``parents[i]``; parents come first."""

    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    payloads: Sequence[object]
    """Buffers; or what ``stage`` gave, whose first blocks they are."""
    token_ids: Sequence[int] = ()
    durability: Durability | None = None


@dataclass(frozen=True, slots=True)
class GotBlocks:
    """What ``get`` copied out. ``payloads[i]`` is a part of ``buffer``, None where the outcome is not HIT.

    A payload has the slices (units, in a namespace with ``raw_layers``) under ``codecs[i]`` without padding. The
    buffer is the caller's.
    """

    outcomes: tuple[Outcome, ...]
    reasons: tuple[Reason, ...]
    payloads: tuple[memoryview | None, ...]
    codecs: tuple[Codec, ...]
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block where it lies, valid inside the ``with``, as ``codec`` except for the layout's raw layers."""

    memory: memoryview
    offset: int
    layout: BlockLayout
    codec: Codec
    version: int = 0
    versions: Sequence[int] = ()
    """Of the pages of ``memory``, as they are now; empty where it has none."""

    def held(self) -> bool:
        """Whether what was read up to now was this block's: its page has the version still that was told with it."""
        return not self.version or self.versions[self.offset >> PAGE_BITS] == self.version

    def slice(self, layer: int) -> memoryview:
        """Bytes of one layer."""
        if not 0 <= layer < self.layout.layers:
            raise InvalidArgument("layer", layer, f"0 to {self.layout.layers - 1}")
        begin = self.offset + self.layout.layer_offset(self.codec, layer)
        return self.memory[begin : begin + self.layout.of_codec(self.layout.layer_codec(self.codec, layer))[0]]


class Views(tuple[BlockView | None, ...]):
    """What ``get_in_place`` shows: a view a key, None where it is not HIT. ``held`` says whether they can be believed.

    While they are open their lease is renewed. Its time can end all the same: this process was stopped, the daemon was
    away. Then other blocks may come to lie there, and ``held`` is False from the first one on.
    """

    lease: Any = None
    rights: Any = None
    lost = False
    """Whether the lease could not be renewed."""
    ended = False
    _held = True

    @classmethod
    def of(cls, fetched: FetchResult, layout: BlockLayout, memory: Memory, versions: Mapping[Area, Any]) -> Views:
        """Where the fetched blocks lie."""
        areas: dict[Area, memoryview] = {}
        views: list[BlockView | None] = []
        for outcome, place in zip(fetched.outcomes, fetched.places, strict=True):
            if place is None or outcome is not Outcome.HIT:
                views.append(None)
                continue
            area = place.area
            if area not in areas:
                areas[area] = memory(area)
            numbers = versions.get(area, ())
            version = place.version if len(numbers) else 0
            views.append(BlockView(areas[area], place.offset, layout, place.codec, version, numbers))
        return cls(views)

    def held(self) -> bool:
        """Whether all that was read from the views up to now (or up to the end of the ``with``) was their blocks'."""
        if not self.ended:
            self._held = self._held and all(view is None or view.held() for view in self)
        return self._held

    def end(self, alive: bool) -> bool:
        """Look a last time, before the pins go; ``alive``: whether the lease is known to have lived until now.

        Where memory has no versions (CUDA) the lease alone has to do.
        """
        proven = self.held() and (alive or all(view is None or view.version for view in self))
        self._held, self.ended = proven, True
        return proven


@dataclass(frozen=True, slots=True)
class PutPlan:
    """A put that was checked: its blocks, their bytes, and the parts that are written one after another."""

    blocks: PutBlocks
    layout: BlockLayout
    sources: list[memoryview]
    step: int
    """Blocks of one part."""

    @classmethod
    def of(cls, layout: BlockLayout, blocks: PutBlocks, part_bytes: int = PUT_PART_BYTES) -> PutPlan:
        """Check sizes. InvalidArgument naming the field that does not fit."""
        check_blocks(blocks, "parents", "payloads")
        size = layout.layers * layout.raw_slice_bytes
        sources = [as_bytes(f"payloads[{i}]", payload, size) for i, payload in enumerate(blocks.payloads)]
        return cls(blocks, layout, sources, max(1, part_bytes // layout.stored_bytes))

    @classmethod
    def staged(cls, layout: BlockLayout, blocks: PutBlocks) -> PutPlan:
        """Of blocks whose bytes are where they are to be already. Checks as ``of``."""
        check_blocks(blocks, "parents")
        return cls(blocks, layout, [], BATCH_KEYS_MAX)

    @property
    def parts(self) -> list[slice]:
        """All blocks in parts of ``step``."""
        count = len(self.blocks.keys)
        return [slice(begin, min(begin + self.step, count)) for begin in range(0, count, self.step)]

    def places_max(self, room_bytes: int) -> int:
        """Blocks that half of a buffer of ``room_bytes`` holds, 1 at least; the other half is for cold reads."""
        return max(1, room_bytes // 2 // self.layout.raw_stored_bytes)

    def keys(self, part: slice) -> Sequence[BlockKey]:
        """Keys of a part."""
        return self.blocks.keys[part]

    def tokens(self, part: slice) -> Sequence[int]:
        """Token ids of a part's blocks."""
        ids = self.blocks.token_ids
        if not ids:
            return ()
        each = len(ids) // len(self.blocks.keys)
        return ids[part.start * each : part.stop * each]

    def writes(self, part: slice, places: Sequence[Standing], memory: Memory) -> Copying:
        """The copy that fills the places of a part; all are of one namespace, so of one stride."""
        size, layers, stride = self.layout.raw_slice_bytes, self.layout.layers, places[0].place.stride
        buffer, reach = memory(Area.BUFFER), (layers - 1) * stride + size
        targets = [buffer[place.offset : place.offset + reach] for _, place, _ in places]
        return Copies(layers, size, stride, size, targets, self.sources[part])

    def entries(self, part: slice, places: Sequence[Standing]) -> list[CommitEntry]:
        """What a part commits."""
        pairs = zip(places, self.blocks.keys[part], self.blocks.parents[part], strict=True)
        return [CommitEntry(standing.reservation_id, key, parent) for standing, key, parent in pairs]


def check_blocks(blocks: PutBlocks, *fields: str) -> None:
    """Refuse fields that do not go with the keys."""
    count = len(blocks.keys)
    for field in fields:
        size = len(getattr(blocks, field))
        if size != count:
            raise InvalidArgument(field, f"{size} entries", f"{count} entries, one for each of keys")
    if len(blocks.token_ids) % max(count, 1):
        raise InvalidArgument("token_ids", f"{len(blocks.token_ids)} tokens", f"block_tokens for each of {count} keys")


def no_room(count: int, busy: Busy | None) -> CommitResult:
    """The answer for blocks that found no place."""
    busy = busy or Busy(Tier.HOST, 0, 0, 0, Reason.NO_SPACE)
    return CommitResult((Outcome.MISS,) * count, (busy.reason,) * count, (False,) * count, (None,) * count, busy)


def joined(results: Sequence[CommitResult]) -> CommitResult:
    """The results of parts as one."""
    if len(results) == 1:
        return results[0]
    return CommitResult(
        tuple(o for r in results for o in r.outcomes),
        tuple(x for r in results for x in r.reasons),
        tuple(e for r in results for e in r.existed),
        tuple(p for r in results for p in r.places),
        next((r.busy for r in results if r.busy is not None), None),
    )


def put_failed(count: int) -> CommitResult:
    """The answer of a cache that took nothing."""
    return CommitResult((Outcome.MISS,) * count, (Reason.DROPPED,) * count, (False,) * count, (None,) * count)


@dataclass(frozen=True, slots=True)
class GetPlan:
    """A get that was checked: where its payloads go. Each block has a slot of ``slot_bytes`` in ``destination``."""

    layout: BlockLayout
    destination: memoryview
    slot_bytes: int

    @classmethod
    def of(cls, layout: BlockLayout, count: int, out: object, slot: int = 0) -> GetPlan:
        """Check the caller's buffer. ``slot``: what ``slot_bytes`` says of the layout, if the caller knows it."""
        slot = slot or slot_bytes(layout)
        destination = as_bytes("out", out, slot * count)
        if destination.readonly:
            raise InvalidArgument("out", "read-only", "a writable buffer")
        return cls(layout, destination, slot)

    def slot(self, index: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a block's slot."""
        return self.destination[index * self.slot_bytes : index * self.slot_bytes + nbytes]

    def reads(self, fetched: FetchResult, memory: Memory) -> tuple[Sequence[Copying], GotBlocks]:
        """Copies that fill the slots, and the answer once they are done."""
        layout, destination, slot = self.layout, self.destination, self.slot_bytes
        payloads: list[memoryview | None] = [None] * len(fetched.outcomes)
        codecs = [Codec.RAW] * len(fetched.outcomes)
        groups: dict[tuple[Area, int, Codec], tuple[memoryview, int, int, Copies]] = {}
        found: list[Copies] = []
        # One loop, which calls no function of ours for a block.
        for i, place in enumerate(fetched.places):
            if place is None or fetched.outcomes[i] is not Outcome.HIT:
                continue
            area, offset, stride, codec, _ = place
            kind = area, stride, codec
            if kind not in groups:
                units, size = layout.units_of(codec), layout.of_codec(codec)[0]
                found.append(Copies(units, size, size, stride))
                groups[kind] = memory(area), (units - 1) * stride + size, units * size, found[-1]
            source, reach, nbytes, copies = groups[kind]
            target = destination[i * slot : i * slot + nbytes]
            copies.targets.append(target)
            copies.sources.append(source[offset : offset + reach])
            payloads[i], codecs[i] = target, codec
        return found, GotBlocks(fetched.outcomes, fetched.reasons, tuple(payloads), tuple(codecs), destination)

    def proven(
        self, got: GotBlocks, fetched: FetchResult, versions: Mapping[Area, Sequence[int]]
    ) -> tuple[GotBlocks, int]:
        """After the copies: a HIT only where the place has the version still that came with it, and how many have not.

        Such a block went while it was copied (the lease had ended: this process was stopped, say), so the bytes may
        be another's: a miss.
        """
        wrong: list[int] = []
        for i, place in enumerate(fetched.places):
            if (
                place is not None
                and place.version
                and got.outcomes[i] is Outcome.HIT
                and place.area in versions
                and versions[place.area][place.offset >> PAGE_BITS] != place.version
            ):
                wrong.append(i)  # noqa: PERF401  a comprehension is a call more
        if not wrong:
            return got, 0
        outcomes, reasons, payloads = list(got.outcomes), list(got.reasons), list(got.payloads)
        for i in wrong:
            outcomes[i], reasons[i], payloads[i] = Outcome.MISS, Reason.EVICTED, None
        return replace(got, outcomes=tuple(outcomes), reasons=tuple(reasons), payloads=tuple(payloads)), len(wrong)


def slot_bytes(layout: BlockLayout) -> int:
    """Bytes that hold any payload of a namespace: the larger of raw and coded."""
    return max(layout.units_of(codec) * layout.of_codec(codec)[0] for codec in Codec)
