"""For every field of every request: values that are wrong, the error that they must get, and the field it must name.

``RULES`` is keyed by "Message.field"; a nested message's fields stand under the nested message's name. A field
for which every value is right is in ``FREE`` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INVALID = "INVALID_ARGUMENT"
NO_NAMESPACE = "UNKNOWN_NAMESPACE"
HUGE32 = 2**32 - 1
"""Also what -1 becomes on the wire."""
STRANGER = bytes([0xEE]) * 32


@dataclass(frozen=True)
class Bad:
    """One wrong value. ``also`` sets other fields with it."""

    value: Any
    reason: str = INVALID
    field: str | None = None
    also: tuple[tuple[str, Any], ...] = ()


def keys_like(field: str = "keys") -> list[Bad]:
    return [
        Bad(bytes(31), field=field),
        Bad(bytes(33), field=field),
        Bad(STRANGER + STRANGER, field=field),
        Bad(b"".join(i.to_bytes(32, "big") for i in range(4097)), field=field),
    ]


NAMESPACE = [
    Bad(b"", field="namespace_id"),
    Bad(bytes(31), field="namespace_id"),
    Bad(bytes(33), field="namespace_id"),
    Bad(STRANGER, NO_NAMESPACE, "namespace_id"),
]
OPTIONAL_NAMESPACE = NAMESPACE[1:]
LEASE = [
    Bad(0, field="lease_id"),
    Bad(999_999, "UNKNOWN_LEASE", "lease_id"),
    Bad(2**63, "UNKNOWN_LEASE", "lease_id"),
    Bad("expired", "UNKNOWN_LEASE", "lease_id"),
    Bad("foreign", "UNKNOWN_LEASE", "lease_id"),
]
NAME = [Bad("n" * 257, field="name")]
PIN_NAME = [Bad("", field="name"), *NAME]
ARENA_TIER = [Bad(0, field="tier"), Bad(3, field="tier"), Bad(99, field="tier")]
LONG = "x" * 16385

PLAN = [Bad(0, field="plan_id"), Bad(999_999, "UNKNOWN_PLAN", "plan_id")]

RULES: dict[str, list[Bad]] = {
    "OpenNamespaceRequest.spec": [Bad(None, field="spec")],
    "OpenNamespaceRequest.name": [*NAME, Bad("bound", "NAMESPACE_MISMATCH", "model")],
    "OpenNamespaceRequest.expected_id": [
        Bad(bytes(31), field="expected_id"),
        Bad(STRANGER, "NAMESPACE_MISMATCH", "expected_id"),
    ],
    "NamespaceSpec.model": [Bad(""), Bad(LONG)],
    "NamespaceSpec.revision": [Bad(LONG)],
    "NamespaceSpec.dtype": [Bad(""), Bad("float17"), Bad(LONG)],
    "NamespaceSpec.layers": [Bad(0), Bad(1025), Bad(HUGE32)],
    "NamespaceSpec.kv_heads": [Bad(0), Bad(HUGE32)],
    "NamespaceSpec.head_dim": [Bad(0), Bad(HUGE32)],
    "NamespaceSpec.block_tokens": [Bad(0), Bad(HUGE32)],
    "NamespaceSpec.rope": [Bad("{"), Bad('{"b":1, "a":2}'), Bad('"' + LONG + '"')],
    "NamespaceSpec.layout_version": [Bad(0), Bad(2), Bad(HUGE32)],
    "NamespaceSpec.codec": [Bad(""), Bad("zip")],
    "NamespaceSpec.shard_index": [Bad(1), Bad(HUGE32)],
    "NamespaceSpec.shard_count": [Bad(0), Bad(HUGE32)],
    "NamespaceSpec.salt": [Bad(LONG.encode())],
    "NamespaceSpec.opaque_slice_bytes": [Bad(2**63), Bad((1 << 30) + 1)],
    "NamespaceSpec.extra": [Bad("nonsense"), Bad('"' + LONG + '"')],
    "NamespacePolicy.write": [Bad(99)],
    "NamespacePolicy.durability": [Bad(99)],
    "NamespaceSpec.raw_layers": [Bad([99])],
    "NamespacePolicy.lossless": [Bad("zip")],
    "NamespacePolicy.device_codec": [Bad("zip"), Bad("int4")],
    "MatchRequest.namespace_id": NAMESPACE,
    "MatchRequest.keys": keys_like(),
    "ReserveRequest.namespace_id": NAMESPACE,
    "ReserveRequest.tier": ARENA_TIER,
    "ReserveRequest.keys": [*keys_like(), Bad(b"", field="count")],
    "ReserveRequest.count": [
        Bad(1, field="count"),
        Bad(4097, field="count", also=(("keys", b""),)),
        Bad(HUGE32, also=(("keys", b""),)),
    ],
    "ReserveRequest.durability": [Bad(99, field="durability")],
    "ReserveRequest.standing": [Bad(True, field="standing")],
    "CommitRequest.namespace_id": NAMESPACE,
    "CommitRequest.reservation_ids": [
        Bad([], field="reservation_ids"),
        Bad([1, 2], field="reservation_ids"),
        Bad([999_999], "UNKNOWN_RESERVATION", "reservation_ids"),
        Bad("done", "UNKNOWN_RESERVATION", "reservation_ids"),
        Bad("foreign", "UNKNOWN_RESERVATION", "reservation_ids"),
    ],
    "CommitRequest.keys": [*keys_like(), Bad(b"", field="parents")],
    "CommitRequest.parents": [
        Bad(b"", field="parents"),
        Bad(bytes(31), field="parents"),
        Bad(bytes(64), field="parents"),
    ],
    "CommitRequest.token_ids": [Bad([1, 2, 3], field="token_ids"), Bad([7] * 16, field="keys")],
    "CommitRequest.durability": [Bad(99, field="durability")],
    "CommitRequest.lease_id": LEASE[1:],
    "AbortRequest.reservation_ids": [
        Bad([], field="reservation_ids"),
        Bad(list(range(1, 4098)), field="reservation_ids"),
    ],
    "FetchRequest.namespace_id": NAMESPACE,
    "FetchRequest.keys": keys_like(),
    "FetchRequest.target": [Bad(0, field="target"), Bad(99, field="target")],
    "FetchRequest.layer_begin": [
        Bad(3, field="layer"),
        Bad(HUGE32, field="layer"),
        Bad(2, field="layer", also=(("layer_end", 1),)),
    ],
    "FetchRequest.layer_end": [Bad(4, field="layer_end"), Bad(HUGE32, field="layer_end")],
    "FetchRequest.lease_id": LEASE,
    "FetchRequest.wait_ms": [Bad(HUGE32, field="wait_ms")],
    "OpenPlanRequest.namespace_id": NAMESPACE,
    "OpenPlanRequest.keys": keys_like(),
    "OpenPlanRequest.layer_begin": [Bad(99, also=(("layer_end", 100),))],
    "OpenPlanRequest.layer_end": [Bad(99), Bad(HUGE32)],
    "OpenPlanRequest.piece_bytes": [Bad(0), Bad(4095), Bad(2**63)],
    "OpenPlanRequest.pieces": [Bad(0), Bad(63), Bad(HUGE32)],
    "OpenPlanRequest.idle_ms": [Bad(1), Bad(HUGE32)],
    "ExtendPlanRequest.plan_id": PLAN,
    "ExtendPlanRequest.keys": keys_like(),
    "AdvancePlanRequest.plan_id": PLAN,
    "AdvancePlanRequest.layer_begin": [Bad(99, field="layer", also=(("layer_end", 100),))],
    "AdvancePlanRequest.layer_end": [Bad(99, field="layer"), Bad(HUGE32, field="layer")],
    "AdvancePlanRequest.blocks": [Bad([99], also=(("some", True),))],
    "ClosePlanRequest.plan_id": PLAN[:1],
    "WaitJobRequest.job_id": [Bad(0, "UNKNOWN_JOB", "job_id"), Bad(999_999, "UNKNOWN_JOB", "job_id")],
    "WaitJobRequest.timeout_ms": [Bad(HUGE32, field="timeout_ms")],
    "PrefetchRequest.namespace_id": NAMESPACE,
    "PrefetchRequest.keys": keys_like(),
    "PrefetchRequest.tier": ARENA_TIER,
    "RemoveRequest.namespace_id": NAMESPACE,
    "RemoveRequest.keys": keys_like(),
    "FlushRequest.timeout_ms": [Bad(HUGE32, field="timeout_ms")],
    "GrantLeaseRequest.name": NAME,
    "GrantLeaseRequest.ttl_ms": [Bad(0, field="ttl_ms")],
    "RenewLeaseRequest.lease_id": LEASE,
    "HoldLeaseRequest.lease_id": LEASE,
    "HoldLeaseRequest.namespace_id": NAMESPACE,
    "HoldLeaseRequest.keys": keys_like(),
    "ReleaseLeaseRequest.lease_id": LEASE,
    "ReleaseLeaseRequest.namespace_id": NAMESPACE,
    "ReleaseLeaseRequest.keys": [*keys_like(), Bad(b"", field="keys")],
    "OpenRemoteRequest.name": NAME,
    "OpenRemoteRequest.ttl_ms": [Bad(1, field="ttl_ms"), Bad(HUGE32, field="ttl_ms")],
    "ListBlocksRequest.namespace_id": OPTIONAL_NAMESPACE,
    "ListBlocksRequest.tier": [Bad(99, field="tier")],
    "ListBlocksRequest.limit": [Bad(1001, field="limit"), Bad(HUGE32, field="limit")],
    "ListBlocksRequest.page_token": [Bad("nonsense", field="page_token")],
    "ListNamespacesRequest.page_token": [Bad("nonsense", field="page_token")],
    "ListLeasesRequest.page_token": [Bad("nonsense", field="page_token")],
    "ExplainRequest.namespace_id": NAMESPACE,
    "ExplainRequest.key_prefix": [
        Bad(b"", field="key_prefix"),
        Bad(bytes(3), field="key_prefix"),
        Bad(bytes(33), field="key_prefix"),
    ],
    "TreeRequest.namespace_id": NAMESPACE,
    "TreeRequest.limit": [Bad(1001, field="limit"), Bad(HUGE32, field="limit")],
    "ForgetRequest.namespace_id": NAMESPACE,
    "ForgetRequest.limit": [Bad(65_537, field="limit"), Bad(HUGE32, field="limit")],
    "ShowBlockRequest.namespace_id": OPTIONAL_NAMESPACE,
    "ShowBlockRequest.key_prefix": [
        Bad(b"", field="key_prefix"),
        Bad(bytes(3), field="key_prefix"),
        Bad(bytes(33), field="key_prefix"),
        Bad(STRANGER, "UNKNOWN_BLOCK"),
    ],
    "WhyRequest.namespace_id": NAMESPACE,
    "WhyRequest.token_ids": [Bad([1] * 16, field="token_ids")],
    "WhyRequest.keys": [*keys_like(), Bad(b"", field="token_ids")],
    "EvictRequest.namespace_id": NAMESPACE,
    "EvictRequest.keys": keys_like(),
    "EvictRequest.tier": [Bad(0, field="tier"), Bad(99, field="tier")],
    "EvictRequest.bytes": [Bad(1, field="bytes"), Bad(0, field="bytes", also=(("keys", b""),))],
    "PinRequest.namespace_id": NAMESPACE,
    "PinRequest.keys": keys_like(),
    "PinRequest.name": PIN_NAME,
    "UnpinRequest.namespace_id": NAMESPACE,
    "UnpinRequest.keys": keys_like(),
    "UnpinRequest.name": PIN_NAME,
    "VerifyRequest.namespace_id": NAMESPACE,
    "VerifyRequest.keys": keys_like(),
    "DrainRequest.timeout_ms": [Bad(HUGE32, field="timeout_ms")],
    "CompactRequest.fragmentation": [
        Bad(-0.5, field="fragmentation"),
        Bad(1.5, field="fragmentation"),
        Bad(float("nan")),
    ],
}

FREE = {
    "AdvancePlanRequest.some": "a bool",
    "AdvancePlanRequest.drop": "a bool",
    "MatchRequest.mapped": "any count of keys: it moves a counter and nothing else",
    "TraceRequest.after_sequence": "any number is a moment: nothing came after one that is above all",
    "ReserveRequest.whole": "a bool",
    "NamespacePolicy.raw_first_tokens": "any count of tokens",
    "OpenNamespaceRequest.policy": "a message; its fields have rules",
    "VerifyRequest.bytes_per_second": "any rate; 0 is none",
    "DrainRequest.resume": "a bool",
    "ListQuarantineRequest.empty": "a bool",
}
