"""Blocks under their codec on DEVICE already, where the policy says so: encoded at commit, outside the lock."""

from __future__ import annotations

from kvstore.core.errors import InternalError
from kvstore.core.types import Codec, Tier
from kvstore.store.columns.lifecycle import Copy
from kvstore.store.moves.move import Movement
from kvstore.store.tables.namespaces import Namespace


def encode(movement: Movement, namespace: Namespace, place: int) -> memoryview | None:
    """The units under the namespace's codec of the raw block at an offset of DEVICE; None if it has to stay raw.

    That is counted where values are the reason; where raw is not larger, nothing is tried.
    """
    device, layout, codec = movement.device, namespace.layout, namespace.codec
    nbytes = layout.units_bytes(codec)
    if device is None or namespace.bytes_in(Tier.DEVICE, codec, codec) >= layout.device_bytes:
        return None
    scratch = memoryview(bytearray(layout.units_bytes(Codec.RAW)))
    if device.encode(place, layout, namespace.spec, codec, scratch) is codec:
        return scratch[:nbytes]
    with movement.state.locked() as book:
        book.counters.count("device_blocks_kept_raw")
    return None


def replace(movement: Movement, namespace: Namespace, copy: Copy, coded: memoryview) -> None:
    """Give the raw range of a reserved copy back, and put the coded bytes into a smaller one.

    The smaller one is taken out of what was given back under the same lock, so that a full DEVICE is no obstacle.
    """
    state, device = movement.state, movement.device
    if device is None:
        raise InternalError("a block on DEVICE is encoded without a DEVICE tier")
    nbytes = namespace.bytes_in(Tier.DEVICE, namespace.codec, namespace.codec)
    with state.locked() as book:
        device.free(copy.place, copy.nbytes)
        place = device.allocate(nbytes)
        if place is None:
            raise InternalError(f"{nbytes} bytes do not fit where {copy.nbytes} were given back")
        state.reserved_bytes += nbytes - copy.nbytes
        copy.place, copy.nbytes = place, nbytes
        book.counters.count("device_blocks_encoded")
    device.write(place, coded)
