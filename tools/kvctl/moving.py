"""What export and import share: a client beside the command's session, and blocks as ``put`` takes them."""

from __future__ import annotations

from typing import Final

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import NamespaceMismatch
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Codec
from kvstore.tools.kvctl.command import Call
from kvstore.v1 import admin_pb2
from kvstore.wire import messages

BUFFER_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 32 << 20
"""Blocks that are got or put together."""


def open_client(call: Call, info: admin_pb2.NamespaceInfo) -> Client:
    """A strict client with the namespace open. NamespaceMismatch if the daemon gives its spec another id."""
    options = ClientOptions(name="kvctl", strict=True, buffer_bytes=BUFFER_BYTES, timeout_s=call.timeout)
    client = Client(call.socket, options)
    try:
        opened = client.open_namespace(
            messages.spec_of(info.spec), name=info.name, policy=messages.policy_of(info.policy)
        )
        if opened.namespace_id != info.namespace_id:
            raise NamespaceMismatch(
                f"the namespace is {info.namespace_id.hex()[:16]}, and its spec says {opened.namespace_id.hex()[:16]}",
                field="namespace_id",
            )
    except BaseException:
        client.close()
        raise
    return client


def raw_payload(spec: NamespaceSpec, layout: BlockLayout, codec: Codec, payload: bytes) -> bytes:
    """A block's raw slices, layer by layer, from its payload under ``codec``, which was verified."""
    if codec is Codec.RAW:
        return payload
    from kvstore.kernels import quant  # noqa: PLC0415 - only where blocks are coded

    geometry, unit, found = spec.geometry, layout.slice_bytes, bytearray()
    for layer in range(layout.layers):
        begin, end = layout.unit_range(codec, (layer, layer + 1))
        data = payload[begin * unit : end * unit]
        if layout.layer_codec(codec, layer) is Codec.RAW:
            found += data[: layout.raw_slice_bytes]
        else:
            raw = bytearray(layout.raw_slice_bytes)
            quant.dequantise(data[: geometry.int8_bytes], raw, geometry, 1)
            found += raw
    return bytes(found)
