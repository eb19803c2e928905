"""Right messages for every method, from a small world that exists in the daemon: where mutation begins."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from kvstore.client import Client
from kvstore.core.types import Tier
from kvstore.rpc.table import METHODS
from kvstore.tools.chaos.ground import Tenant, chain
from kvstore.v1 import cache_pb2, events_pb2
from kvstore.wire.messages import spec_message

STREAMS: Final[dict[str, type[Message]]] = {
    "kvstore.v1.Cache/Read": cache_pb2.ReadRequest,
    "kvstore.v1.Cache/Write": cache_pb2.WriteChunk,
    "kvstore.v1.Events/Subscribe": events_pb2.SubscribeRequest,
}


class Seeds:
    """A tenant with some blocks, a lease and a reservation, and a right request of each method about them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.tenant = Tenant.of(1)
        self.keys = chain("seeds", 8)
        client.open_namespace(self.tenant.spec)
        client.put(self.tenant.id, self.tenant.blocks(self.keys[:6]))
        self.renew()

    def renew(self) -> None:
        """A lease and a reservation that live: messages before may have ended the last ones."""
        self.lease = self.client.grant_lease("fuzz", 20_000)
        reserved = self.client.reserve(self.tenant.id, Tier.HOST, keys=self.keys[6:7])
        self.reservation = reserved.reservation_ids[0] if reserved.reservation_ids else 0

    def request(self, name: str) -> Message:
        """A right request of a method."""
        kind = STREAMS[name] if name in STREAMS else METHODS[name].request
        values: dict[str, Any] = {
            "namespace_id": self.tenant.id, "keys": b"".join(self.keys[:2]), "lease_id": self.lease, "name": "fuzz",
            "ttl_ms": 2000, "tier": 2, "target": 2, "wait_ms": 1, "timeout_ms": 1, "key_prefix": self.keys[0],
            "fragmentation": 0.9, "limit": 10, "bytes": 4096, "bytes_per_second": 0, "job_id": 1, "token_ids": [1] * 4,
            "reservation_ids": [self.reservation],
        }  # fmt: skip
        if name.endswith("/Commit"):
            values |= {"keys": self.keys[6], "parents": self.keys[5]}
        if name.endswith("/OpenNamespace"):
            values = {"spec": spec_message(self.tenant.spec)}
        if name.endswith("/Write"):
            header = cache_pb2.WriteHeader(namespace_id=self.tenant.id, keys=self.keys[7], parents=self.keys[6])
            values = {"header": header}
        if name.endswith(("/Evict", "/Verify", "/Why")):
            values.pop("token_ids")
        known = {field.name for field in kind.DESCRIPTOR.fields}
        message = kind()
        for field, value in values.items():
            if field not in known:
                continue
            if isinstance(value, Message):
                getattr(message, field).CopyFrom(value)
            elif isinstance(value, list):
                getattr(message, field).extend(value)
            else:
                setattr(message, field, value)
        return message
