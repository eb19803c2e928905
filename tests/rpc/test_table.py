"""The table has every unary RPC of the protos; the protos keep their promises to old clients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import Default

from kvstore.cache import ReserveResult
from kvstore.core.types import Tier
from kvstore.rpc.table import METHODS
from kvstore.v1 import admin_pb2, cache_pb2, common_pb2, events_pb2, inspect_pb2, leases_pb2, plans_pb2, session_pb2
from kvstore.wire.verbs import Runs

MODULES = (common_pb2, cache_pb2, leases_pb2, session_pb2, inspect_pb2, admin_pb2, events_pb2, plans_pb2)
COMMITTED = Path(__file__).with_name("descriptors.binpb")
"""A FileDescriptorSet of every proto, as last released. To release a compatible change, run this file as a script."""

STREAMS = {"kvstore.v1.Cache/Read", "kvstore.v1.Cache/Write", "kvstore.v1.Events/Subscribe"}


def rpcs():
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"{service.full_name}/{method.name}", method


def test_every_rpc_is_in_the_table_with_its_messages():
    found = dict(rpcs())
    assert {name for name, method in found.items() if method.client_streaming or method.server_streaming} == STREAMS
    assert METHODS.keys() == found.keys() - STREAMS
    for name, method in METHODS.items():
        assert method.request.DESCRIPTOR is found[name].input_type
        assert method.reply.DESCRIPTOR is found[name].output_type


def test_rights():
    assert {name for name, method in METHODS.items() if method.admin} == {
        n for n in METHODS if "/" in n and ".Admin/" in n
    }
    assert {name for name, method in METHODS.items() if not method.session and not method.admin} == {
        "kvstore.v1.Sessions/OpenRemote"
    }


def test_what_copies_or_waits_leaves_the_loop():
    runs = {name.partition("/")[2]: method.runs for name, method in METHODS.items()}
    assert {name for name, where in runs.items() if where is Runs.INLINE} == {
        "Match", "Reserve", "Abort", "Fetch", "WaitJob", "Prefetch", "GrantLease", "RenewLease", "HoldLease",
        "ReleaseLease", "AdvancePlan", "OpenRemote", "Keepalive", "Status", "Pin", "Unpin",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "request_of"),
    [
        ("Reserve", lambda n: cache_pb2.ReserveRequest(namespace_id=bytes(32), tier=int(Tier.HOST), count=n)),
        ("Abort", lambda n: cache_pb2.AbortRequest(reservation_ids=range(1, n + 1))),
    ],
)
def test_many_places_leave_the_loop_though_they_are_asked_for_in_few_bytes(name, request_of):
    asked = []
    nothing = ReserveResult((), (), (), None, False)
    session = SimpleNamespace(
        reserve=lambda *_, **given: asked.append(given["count"]) or nothing,
        abort=lambda ids: asked.append(len(ids)) or 0,
    )
    method, call = METHODS[f"kvstore.v1.Cache/{name}"], SimpleNamespace(session=session)
    method.serve(call, request_of(256))
    later = method.serve(call, request_of(257))
    assert asked == [256]
    later()
    assert asked == [256, 257]
    assert method.waits is Runs.WORK


def descriptor_set():
    files = descriptor_pb2.FileDescriptorSet()
    for module in MODULES:
        Default().FindFileByName(module.DESCRIPTOR.name).CopyToProto(files.file.add())
    return files


def field_key(field):
    return field.name, field.type, field.label, field.type_name


def breaches(old, new):
    """What of ``old`` a client built against it would miss in ``new``."""
    new_files = {file.name: file for file in new.file}
    for file in old.file:
        other = new_files.get(file.name)
        if other is None:
            yield f"{file.name} is gone"
            continue
        yield from message_breaches(file, other)
        yield from enum_breaches(file, other)
        yield from service_breaches(file, other)


def message_breaches(file, other):
    messages = {message.name: message for message in other.message_type}
    for message in file.message_type:
        if message.name not in messages:
            yield f"message {message.name} is gone"
            continue
        fields = {field.number: field for field in messages[message.name].field}
        for field in message.field:
            if field.number not in fields:
                yield f"{message.name}.{field.name} is gone"
            elif field_key(field) != field_key(fields[field.number]):
                yield f"{message.name}.{field.name} is another field now"


def enum_breaches(file, other):
    enums = {enum.name: {value.number: value.name for value in enum.value} for enum in other.enum_type}
    for enum in file.enum_type:
        for value in enum.value:
            if enums.get(enum.name, {}).get(value.number) != value.name:
                yield f"{enum.name}.{value.name} is gone or another value now"


def service_breaches(file, other):
    methods = {(s.name, m.name): m.SerializeToString() for s in other.service for m in s.method}
    for service in file.service:
        for method in service.method:
            if methods.get((service.name, method.name)) != method.SerializeToString():
                yield f"{service.name}/{method.name} is gone or another method now"


def committed():
    return descriptor_pb2.FileDescriptorSet.FromString(COMMITTED.read_bytes())


def test_the_protos_are_compatible_with_the_committed_ones():
    assert list(breaches(committed(), descriptor_set())) == []


def test_additions_are_committed_too():
    assert list(breaches(descriptor_set(), committed())) == [], "run this file as a script and commit the result"


def test_breaches_are_found():
    changed = descriptor_set()
    cache = next(file for file in changed.file if file.name.endswith("cache.proto"))
    match = next(message for message in cache.message_type if message.name == "MatchRequest")
    match.field[1].name = "key_list"
    common = next(file for file in changed.file if file.name.endswith("common.proto"))
    del common.enum_type[0].value[1]
    del cache.service[0].method[0]
    assert sorted(breaches(committed(), changed)) == [
        "Cache/OpenNamespace is gone or another method now",
        "MatchRequest.keys is another field now",
        "Tier.TIER_DEVICE is gone or another value now",
    ]


if __name__ == "__main__":
    COMMITTED.write_bytes(descriptor_set().SerializeToString(deterministic=True))
