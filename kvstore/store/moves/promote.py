"""Towards hot: SSD to HOST, HOST to DEVICE, and anything to a session's buffer. And DEVICE to HOST, its copy down."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.core.errors import CorruptBlock, TierError
from kvstore.core.transfers import edge
from kvstore.core.types import Codec, Reason, Tier
from kvstore.store.columns.index import NONE
from kvstore.store.moves import copies
from kvstore.store.moves.move import Failures, Fill, Movement
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus

log = logging.getLogger(__name__)

READ_BYTES_MAX: Final = 64 << 20
"""Most bytes of one call to the disk: what is read becomes visible call by call."""

READ_BLOCKS_MAX: Final = 64
"""Most blocks of one call to the disk."""


class Promoter:
    """Fills of HOST and DEVICE. Callers hold refs on the slots that they name."""

    def __init__(self, movement: Movement) -> None:
        self._movement = movement
        self._state = movement.state
        self.device = movement.device
        movement.demotions[Tier.DEVICE] = self.to_host

    def to_host(self, slots: Iterable[int]) -> Failures:
        """Make READY copies in HOST, from DEVICE if a block is there, else from SSD."""
        return self._movement.fill(slots, Tier.HOST, (Tier.DEVICE, *self._state.storages), self._fill_host)

    def to_device(self, slots: Sequence[int]) -> Failures:
        """Make READY copies in DEVICE, by way of HOST."""
        failures: Failures = {}
        left = list(slots)
        # A HOST copy that was just made may be dropped for space before it is read: then it is made again.
        for _ in range(4):
            failures = self.to_host(self._without(left, Tier.DEVICE))
            left = [slot for slot in left if slot not in failures]
            done = self._movement.fill(left, Tier.DEVICE, (Tier.HOST,), self._fill_device)
            failures.update((slot, reason) for slot, reason in done.items() if reason is Reason.NO_SPACE)
            left = [slot for slot in self._without(left, Tier.DEVICE) if slot not in failures]
            if not left:
                break
        failures.update(dict.fromkeys(left, Reason.NO_SPACE))
        return failures

    def _without(self, slots: Iterable[int], tier: Tier) -> list[int]:
        with self._state.locked() as book:
            return [slot for slot in slots if not book.has(slot, tier)]

    def _fill_host(self, fills: list[Fill], failures: Failures) -> None:
        from_disk: list[Fill] = []
        for fill in fills:
            if fill.source in self._state.storages:
                from_disk.append(fill)
            else:
                self._encode(fill, failures)
        while from_disk:
            batch: list[Fill] = []
            nbytes = 0
            source = from_disk[0].source
            while (
                from_disk and from_disk[0].source is source and len(batch) < READ_BLOCKS_MAX and nbytes < READ_BYTES_MAX
            ):
                fill = from_disk.pop(0)
                if self._take(fill, failures):
                    batch.append(fill)
                    nbytes += fill.copy.nbytes
            self._read(batch, failures)

    def _take(self, fill: Fill, failures: Failures) -> bool:
        offset = self._movement.take(fill.copy.tier, fill.copy.nbytes)
        if offset is None:
            failures[fill.slot] = Reason.NO_SPACE
            return False
        fill.copy.place = offset
        return True

    def _encode(self, fill: Fill, failures: Failures) -> None:
        host, device = self._state.arenas[Tier.HOST], self.device
        if device is None or not self._take(fill, failures):
            return
        names = (fill.key, fill.parent)
        coded, began = fill.codec, self._state.transfers.now()
        try:
            stored = host.view(fill.copy.place, fill.copy.nbytes)
            source = (device, fill.source_place)
            fill.codec = copies.store_from_device(fill.namespace, names, coded, source, stored, fill.device_codec)
        except TierError:
            # The block has values that its codec can not hold, so it stays raw, which needs a larger range.
            host.free(fill.copy.place, fill.copy.nbytes)
            fill.codec, fill.copy.place = Codec.RAW, NONE
            fill.copy.nbytes = fill.namespace.layout.raw_stored_bytes
            if not self._take(fill, failures):
                return
            stored = host.view(fill.copy.place, fill.copy.nbytes)
            copies.store_from_device(fill.namespace, names, Codec.RAW, (device, fill.source_place), stored)
        fill.well = fill.codec is coded or self._may_recode(fill, failures)
        self._state.transfers.count(_DOWN, began, 1, fill.copy.nbytes)

    def _may_recode(self, fill: Fill, failures: Failures) -> bool:
        """A block has one codec below DEVICE: it changes only while no stored copy has the old one."""
        with self._state.locked() as book:
            stored = bool(book.index.residency[fill.slot] & self._state.stored)
            if stored:
                failures[fill.slot] = Reason.DROPPED
        return not stored

    def _read(self, fills: list[Fill], failures: Failures) -> None:
        if not fills:
            return
        tier, host = fills[0].source, self._state.arenas[Tier.HOST]
        disk = self._state.storages[tier]
        reads = [
            BlockRead(
                DiskHandle(f.source_place), f.key, host.view(f.copy.place, f.copy.nbytes),
                namespace_id=f.namespace.namespace_id,
            )
            for f in fills
        ]  # fmt: skip
        ready = disk.state.ready
        began = self._state.transfers.now()
        statuses = disk.read(reads)
        for fill, read, status in zip(fills, reads, statuses, strict=True):
            found = self._checked(fill, read) if status is ReadStatus.OK else status
            fill.well = found is ReadStatus.OK
            if not fill.well:
                failures[fill.slot] = self.failed_read(fill.slot, (tier, fill.source_place), found, ready=ready)
        arrived = [fill.copy.nbytes for fill in fills if fill.well]
        failed = len(fills) - len(arrived)
        self._state.transfers.count(edge(tier, Tier.HOST), began, len(arrived), sum(arrived), failed)
        with self._state.locked() as book:
            book.counters.count(f"{tier.name.lower()}_promoted", sum(fill.well for fill in fills))

    def _checked(self, fill: Fill, read: BlockRead) -> ReadStatus:
        """The disk has compared the checksums; the header must be that of this block under this codec, too."""
        try:
            copies.check_stored(fill.namespace, fill.key, fill.codec, read.into, slices=False)
        except CorruptBlock as error:
            log.error("block %s read from SSD is not what was written: %s", fill.key.hex(), error)
            return ReadStatus.CORRUPT
        return ReadStatus.OK

    def failed_read(self, slot: int, at: tuple[Tier, int], status: ReadStatus, *, ready: bool) -> Reason:
        """Invalidate the entry whose load failed, and say why it is a miss.

        Corrupt or gone: the copy is dropped. Unavailable: kept while the whole tier is degraded (it is not matched
        then, and comes back with the tier), dropped if only this block can not be read. ``ready`` says whether the tier
        was ready before the read: one that comes back meanwhile refused it for its own sake, not for the block's.
        """
        tier, handle = at
        degraded = not (self._movement.look_at(tier) and ready)
        with self._state.locked() as book:
            if status is ReadStatus.CORRUPT:
                book.counters.count("corrupt_blocks")
            elif status is ReadStatus.UNAVAILABLE:
                book.counters.count(f"{tier.name.lower()}_reads_failed")
            if status is ReadStatus.UNAVAILABLE and degraded:
                return Reason.TIER_UNAVAILABLE
            reason = _REASONS[status]
            if book.has(slot, tier) and book.index.place[tier][slot] == handle:
                # Gone, though nobody here has dropped it: that was no eviction.
                book.drop(slot, tier, Reason.DROPPED if status is ReadStatus.GONE else reason)
            return reason

    def _fill_device(self, fills: list[Fill], failures: Failures) -> None:
        host, device = self._state.arenas[Tier.HOST], self.device
        for fill in fills:
            if device is None or not self._take(fill, failures):
                continue
            layout = fill.namespace.layout
            source = host.view(fill.source_place + layout.header_bytes, layout.units_bytes(fill.codec))
            began = self._state.transfers.now()
            try:
                if fill.device_codec is Codec.RAW:
                    device.decode(fill.copy.place, layout, fill.namespace.spec, fill.codec, source)
                else:
                    device.write(fill.copy.place, source)
            except TierError as error:
                log.error("block %s can not be decoded (%s): %s", fill.key.hex(), fill.codec.word, error)
                failures[fill.slot] = Reason.TIER_UNAVAILABLE
                self._state.transfers.count(_UP, began, 0, 0, 1)
                continue
            fill.well = True
            self._state.transfers.count(_UP, began, 1, fill.copy.nbytes)
        with self._state.locked() as book:
            book.counters.count("host_promoted", sum(fill.well for fill in fills))


_UP: Final = edge(Tier.HOST, Tier.DEVICE)
_DOWN: Final = edge(Tier.DEVICE, Tier.HOST)

_REASONS = {
    ReadStatus.CORRUPT: Reason.QUARANTINED,
    ReadStatus.UNAVAILABLE: Reason.TIER_UNAVAILABLE,
    ReadStatus.GONE: Reason.EVICTED,
}
