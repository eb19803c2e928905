"""Blocks under INT8 on DEVICE already, where the policy says so: encoded at commit, outside the lock."""

from __future__ import annotations

from kvstore.core.errors import InternalError
from kvstore.core.types import Codec, Tier
from kvstore.store.lifecycle import Copy
from kvstore.store.movement import Movement
from kvstore.store.namespaces import Namespace


def encode(movement: Movement, namespace: Namespace, place: int) -> memoryview | None:
    """The units under INT8 of the raw block at an offset of DEVICE; None if it has to stay raw.

    That is counted where values are the reason; where raw is not larger, nothing is tried.
    """
    device, layout = movement.device, namespace.layout
    nbytes = layout.units_bytes(Codec.INT8)
    if device is None or namespace.bytes_in(Tier.DEVICE, Codec.INT8, Codec.INT8) >= layout.device_bytes:
        return None
    scratch = memoryview(bytearray(layout.units_bytes(Codec.RAW)))
    if device.encode(place, layout, namespace.spec, Codec.INT8, scratch) is Codec.INT8:
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
    nbytes = namespace.bytes_in(Tier.DEVICE, Codec.INT8, Codec.INT8)
    with state.locked() as book:
        device.free(copy.place, copy.nbytes)
        place = device.allocate(nbytes)
        if place is None:
            raise InternalError(f"{nbytes} bytes do not fit where {copy.nbytes} were given back")
        state.reserved_bytes += nbytes - copy.nbytes
        copy.place, copy.nbytes = place, nbytes
        book.counters.count("device_blocks_encoded")
    device.write(place, coded)
