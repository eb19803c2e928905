"""Blocks that lie scattered in an engine's memory, and the copies between them and places in the session's memory.

An engine keeps a block in pieces: one a layer, or one for K and one for V of each, or pages here and there. ``Pieces``
says where they are, so that ``load`` and ``store`` of ``EngineClient`` copy straight from and to them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.cache import FetchResult
from kvstore.client.payloads import GetPlan, GotBlocks, Memory, PutBlocks, PutPlan, check_blocks
from kvstore.client.standing import Standing
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import BATCH_KEYS_MAX, Area, Codec, Outcome, Place
from kvstore.kernels import native

Addresses = NDArray[np.int64]
_NOTHING: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Memory that an engine names by its address, such as a tensor's ``data_ptr()``.

    ``owner`` keeps it alive for as long as it is used; what has no owner must live longer than the client.
    """

    address: int
    nbytes: int
    owner: object = None
    readonly: bool = False


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where blocks lie: ``addresses[i, j]`` is where piece ``j`` of block ``i`` begins, ``piece_bytes`` long.

    The pieces of a block, one after another, are its payload: raw slices, layer by layer, without padding. Two blocks
    that are loaded must not share memory. ``owners`` keep the memory alive.
    """

    addresses: Addresses
    piece_bytes: int
    readonly: bool = False
    owners: tuple[object, ...] = ()

    @classmethod
    def of(
        cls,
        regions: Sequence[object],
        offsets: Sequence[int] | NDArray[Any],
        piece_bytes: int,
        *,
        count: int = 1,
        stride: int = 0,
    ) -> Self:
        """Pieces in ``regions``, each a contiguous buffer or a ``Pointer``, such as the cache of one layer.

        In each region, in their order, a block has ``count`` pieces, ``stride`` bytes apart. ``offsets`` says where its
        first one begins: [blocks], the same in all regions, or [blocks, regions]. Raises InvalidArgument where a piece
        would not lie in its region.
        """
        places = np.asarray(offsets, dtype=np.int64)
        if places.ndim == 1:
            places = np.broadcast_to(places[:, None], (len(places), len(regions)))
        if places.ndim != 2 or places.shape[1] != len(regions):
            raise InvalidArgument("offsets", f"shape {places.shape}", f"[blocks] or [blocks, {len(regions)} regions]")
        if piece_bytes < 1 or count < 1 or (count > 1 and stride < piece_bytes):
            raise InvalidArgument("piece_bytes, count, stride", f"{piece_bytes}, {count}, {stride}", "pieces apart")
        found = [region if isinstance(region, Pointer) else _pointer(region) for region in regions]
        reach = (count - 1) * stride + piece_bytes
        for number, region in enumerate(found):
            mine = places[:, number]
            if len(mine) and (mine.min() < 0 or mine.max() + reach > region.nbytes):
                wrong = int(mine.min() if mine.min() < 0 else mine.max())
                raise InvalidArgument(f"offsets of region {number}", wrong, f"0 to {region.nbytes - reach}")
        begins = places + np.array([region.address for region in found], np.int64)
        steps = np.arange(count, dtype=np.int64) * stride
        addresses = (begins[:, :, None] + steps).reshape(len(places), len(regions) * count)
        return cls(addresses, piece_bytes, any(r.readonly for r in found), tuple(r.owner for r in found))

    @classmethod
    def each(cls, blocks: Sequence[object], nbytes: int) -> Self:
        """One piece a block: ``blocks[i]``, a contiguous buffer or a ``Pointer`` of ``nbytes``."""
        found = [block if isinstance(block, Pointer) else _pointer(block) for block in blocks]
        wrong = next((i for i, one in enumerate(found) if one.nbytes != nbytes), None)
        if wrong is not None:
            raise InvalidArgument(f"blocks[{wrong}]", f"{found[wrong].nbytes} bytes", f"{nbytes} bytes")
        addresses = np.array([one.address for one in found], np.int64).reshape(len(found), 1)
        return cls(addresses, nbytes, any(one.readonly for one in found), tuple(one.owner for one in found))

    def __len__(self) -> int:
        """Blocks."""
        return len(self.addresses)

    def take(self, indices: Sequence[int]) -> Pieces:
        """Those of some blocks."""
        return Pieces(self.addresses[np.asarray(indices, np.intp)], self.piece_bytes, self.readonly, self.owners)

    def check(self, field: str, count: int, layout: BlockLayout) -> None:
        """InvalidArgument unless these are ``count`` payloads of the layout."""
        payload, pieces = layout.layers * layout.raw_slice_bytes, self.addresses.shape[1]
        if len(self) != count or pieces * self.piece_bytes != payload:
            told = f"{len(self)} blocks of {pieces} pieces of {self.piece_bytes} bytes"
            raise InvalidArgument(field, told, f"{count} blocks, one a key, of {payload} bytes each")


@dataclass(frozen=True, slots=True)
class PieceCopies:
    """Copies of equal length from address to address; ``owners`` keep both sides alive."""

    targets: Addresses
    sources: Addresses
    piece_bytes: int
    owners: tuple[object, ...]

    def run(self, threads: int) -> None:
        """Copy, on ``threads`` threads at most where the C++ kernels are; the GIL is free meanwhile."""
        if native.available():
            native.copy_pieces(self.targets, self.sources, self.piece_bytes, threads)
            return
        for target, source in zip(self.targets.tolist(), self.sources.tolist(), strict=True):
            ctypes.memmove(target, source, self.piece_bytes)


def between(pieces: Pieces, places: Sequence[Place], memory: memoryview, layout: BlockLayout) -> tuple[Any, ...]:
    """Addresses of raw blocks' parts, at their places and in their pieces, how long a part is, and who owns them.

    All places are of one area and stride. A part is what lies in one run on both sides.
    """
    slices, size, stride = layout.layers, layout.raw_slice_bytes, places[0].stride
    if stride == size:
        slices, size = 1, slices * size
    part = math.gcd(size, pieces.piece_bytes)
    region = _pointer(memory)
    offsets = np.array([place.offset for place in places], np.int64)
    if len(offsets) and (offsets.min() < 0 or offsets.max() + (slices - 1) * stride + size > region.nbytes):
        raise InvalidArgument("places", int(offsets.max()), f"inside of {region.nbytes} bytes")
    inside = (np.arange(slices, dtype=np.int64)[:, None] * stride + np.arange(0, size, part)).ravel()
    theirs = (region.address + offsets[:, None] + inside).ravel()
    ours = (pieces.addresses[:, :, None] + np.arange(0, pieces.piece_bytes, part)).ravel()
    return theirs, ours, part, (memory, *pieces.owners)


@dataclass(frozen=True, slots=True)
class LoadPlan(GetPlan):
    """A load that was checked: a get whose payloads go into pieces."""

    pieces: Pieces

    @classmethod
    def from_pieces(cls, layout: BlockLayout, count: int, into: Pieces) -> LoadPlan:
        """Check sizes. InvalidArgument naming the field that does not fit."""
        into.check("into", count, layout)
        if into.readonly:
            raise InvalidArgument("into", "read-only", "writable memory")
        return cls(layout, _NOTHING, 0, into)

    def take(self, indices: Sequence[int]) -> LoadPlan:
        """The plan of some of its keys."""
        return LoadPlan(self.layout, _NOTHING, 0, self.pieces.take(indices))

    def reads(self, fetched: FetchResult, memory: Memory) -> tuple[list[PieceCopies], GotBlocks]:
        """Copies that fill the pieces, and the answer once they are done; its payloads are where the pieces are."""
        groups: dict[tuple[Area, int], list[int]] = {}
        for i, place in enumerate(fetched.places):
            if place is None or fetched.outcomes[i] is not Outcome.HIT:
                continue
            if place.codec is not Codec.RAW:
                raise InvalidArgument("into", f"pieces for {place.codec.word} blocks", "a namespace of raw blocks")
            groups.setdefault((place.area, place.stride), []).append(i)
        copies = []
        for (area, _), indices in groups.items():
            places = [place for place in (fetched.places[i] for i in indices) if place is not None]
            theirs, ours, part, owners = between(self.pieces.take(indices), places, memory(area), self.layout)
            copies.append(PieceCopies(ours, theirs, part, owners))
        count = len(fetched.outcomes)
        nothing = (None,) * count
        return copies, GotBlocks(fetched.outcomes, fetched.reasons, nothing, (Codec.RAW,) * count, _NOTHING)


@dataclass(frozen=True, slots=True)
class StorePlan(PutPlan):
    """A put whose payloads lie in pieces."""

    pieces: Pieces

    @classmethod
    def from_pieces(cls, layout: BlockLayout, blocks: PutBlocks, source: Pieces) -> StorePlan:
        """Check sizes. InvalidArgument naming the field that does not fit."""
        check_blocks(blocks, "parents")
        source.check("source", len(blocks.keys), layout)
        return cls(blocks, layout, [], BATCH_KEYS_MAX, source)

    def writes(self, part: slice, places: Sequence[Standing], memory: Memory) -> Any:
        """See ``PutPlan.writes``."""
        pieces = self.pieces.take(range(part.start, part.stop))
        told = [standing.place for standing in places]
        theirs, ours, size, owners = between(pieces, told, memory(Area.BUFFER), self.layout)
        return PieceCopies(theirs, ours, size, owners)


def _pointer(memory: object) -> Pointer:
    """A buffer's address; the array that comes with it holds the buffer."""
    try:
        flat = memoryview(memory).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument("regions", type(memory).__name__, "contiguous buffers, or Pointers") from error
    array = np.frombuffer(flat, np.uint8)
    return Pointer(array.ctypes.data, flat.nbytes, array, flat.readonly)
