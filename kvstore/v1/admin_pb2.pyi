from kvstore.v1 import cache_pb2 as _cache_pb2
from kvstore.v1 import common_pb2 as _common_pb2
from kvstore.v1 import inspect_pb2 as _inspect_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "reserved_bytes", "blocks", "pinned_bytes", "state", "last_error", "backing", "evicted", "demoted", "promoted", "removed", "high_watermark", "low_watermark", "raw_bytes", "saved_bytes", "fragmentation")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    BACKING_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LOW_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    blocks: int
    pinned_bytes: int
    state: str
    last_error: str
    backing: str
    evicted: int
    demoted: int
    promoted: int
    removed: int
    high_watermark: float
    low_watermark: float
    raw_bytes: int
    saved_bytes: int
    fragmentation: float
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., state: _Optional[str] = ..., last_error: _Optional[str] = ..., backing: _Optional[str] = ..., evicted: _Optional[int] = ..., demoted: _Optional[int] = ..., promoted: _Optional[int] = ..., removed: _Optional[int] = ..., high_watermark: _Optional[float] = ..., low_watermark: _Optional[float] = ..., raw_bytes: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., fragmentation: _Optional[float] = ...) -> None: ...

class RecoveryReport(_message.Message):
    __slots__ = ("blocks", "bytes", "seconds", "cut_bytes", "quarantined", "orphans_removed", "mode")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    seconds: float
    cut_bytes: int
    quarantined: int
    orphans_removed: int
    mode: str
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., cut_bytes: _Optional[int] = ..., quarantined: _Optional[int] = ..., orphans_removed: _Optional[int] = ..., mode: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "boot_id", "uptime_seconds", "tiers", "namespaces", "sessions", "leases", "reservations", "jobs", "draining", "recovery", "counters", "warnings", "pid", "index")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_id: bytes
    uptime_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    namespaces: int
    sessions: int
    leases: int
    reservations: int
    jobs: int
    draining: bool
    recovery: RecoveryReport
    counters: _containers.ScalarMap[str, int]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    index: str
    def __init__(self, version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., uptime_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., namespaces: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., jobs: _Optional[int] = ..., draining: _Optional[bool] = ..., recovery: _Optional[_Union[RecoveryReport, _Mapping]] = ..., counters: _Optional[_Mapping[str, int]] = ..., warnings: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., index: _Optional[str] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("page_token",)
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    def __init__(self, page_token: _Optional[str] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("namespace_id", "name", "spec", "policy", "layout", "blocks", "blocks_by_tier", "saved_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    name: str
    spec: _common_pb2.NamespaceSpec
    policy: _common_pb2.NamespacePolicy
    layout: _common_pb2.BlockLayout
    blocks: int
    blocks_by_tier: _containers.RepeatedScalarFieldContainer[int]
    saved_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., name: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.NamespaceSpec, _Mapping]] = ..., policy: _Optional[_Union[_common_pb2.NamespacePolicy, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ..., blocks: _Optional[int] = ..., blocks_by_tier: _Optional[_Iterable[int]] = ..., saved_bytes: _Optional[int] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next_page_token")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    next_page_token: str
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("key", "parent", "namespace_id", "residency", "state", "pins", "holds", "children", "idle_seconds", "hits", "places", "codec")
    class PlacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    namespace_id: bytes
    residency: int
    state: str
    pins: int
    holds: int
    children: int
    idle_seconds: float
    hits: int
    places: _containers.ScalarMap[str, str]
    codec: str
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., residency: _Optional[int] = ..., state: _Optional[str] = ..., pins: _Optional[int] = ..., holds: _Optional[int] = ..., children: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., hits: _Optional[int] = ..., places: _Optional[_Mapping[str, str]] = ..., codec: _Optional[str] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "tier", "limit", "page_token")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tier: _common_pb2.Tier
    limit: int
    page_token: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., limit: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ShowBlockRequest(_message.Message):
    __slots__ = ("namespace_id", "key_prefix")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key_prefix: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., key_prefix: _Optional[bytes] = ...) -> None: ...

class ShowBlockResponse(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: BlockInfo
    def __init__(self, block: _Optional[_Union[BlockInfo, _Mapping]] = ...) -> None: ...

class WhyRequest(_message.Message):
    __slots__ = ("namespace_id", "token_ids", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class WhyResponse(_message.Message):
    __slots__ = ("blocks", "matched", "residency", "key", "reason", "explanation", "seconds_ago", "near")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    matched: int
    residency: _containers.RepeatedScalarFieldContainer[int]
    key: bytes
    reason: _common_pb2.Reason
    explanation: str
    seconds_ago: float
    near: _containers.RepeatedCompositeFieldContainer[_cache_pb2.NearNamespace]
    def __init__(self, blocks: _Optional[int] = ..., matched: _Optional[int] = ..., residency: _Optional[_Iterable[int]] = ..., key: _Optional[bytes] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., explanation: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., near: _Optional[_Iterable[_Union[_cache_pb2.NearNamespace, _Mapping]]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "tier", "bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    tier: _common_pb2.Tier
    bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., bytes: _Optional[int] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("blocks", "bytes", "outcomes", "kept", "kept_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    kept: _containers.RepeatedScalarFieldContainer[str]
    kept_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., kept: _Optional[_Iterable[str]] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "name")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    name: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name", "namespace_id", "keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: bytes
    keys: bytes
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("page_token",)
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    def __init__(self, page_token: _Optional[str] = ...) -> None: ...

class LeaseInfo(_message.Message):
    __slots__ = ("lease_id", "name", "owner", "pid", "seconds_left", "holds", "pins", "buffer_bytes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    name: str
    owner: str
    pid: int
    seconds_left: float
    holds: int
    pins: int
    buffer_bytes: int
    def __init__(self, lease_id: _Optional[int] = ..., name: _Optional[str] = ..., owner: _Optional[str] = ..., pid: _Optional[int] = ..., seconds_left: _Optional[float] = ..., holds: _Optional[int] = ..., pins: _Optional[int] = ..., buffer_bytes: _Optional[int] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("owner", "pid", "uid", "buffer_bytes", "buffer_used_bytes", "reservations", "remote")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    owner: str
    pid: int
    uid: int
    buffer_bytes: int
    buffer_used_bytes: int
    reservations: int
    remote: bool
    def __init__(self, owner: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., buffer_used_bytes: _Optional[int] = ..., reservations: _Optional[int] = ..., remote: _Optional[bool] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "sessions", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseInfo]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseInfo, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "bytes_per_second")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    bytes_per_second: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., bytes_per_second: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("blocks", "bytes", "bad", "bad_keys", "seconds")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    BAD_KEYS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    bad: int
    bad_keys: _containers.RepeatedScalarFieldContainer[bytes]
    seconds: float
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., bad: _Optional[int] = ..., bad_keys: _Optional[_Iterable[bytes]] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume", "timeout_ms")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    timeout_ms: int
    def __init__(self, resume: _Optional[bool] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("draining", "flushed_blocks", "unflushed_blocks")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNFLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    flushed_blocks: int
    unflushed_blocks: int
    def __init__(self, draining: _Optional[bool] = ..., flushed_blocks: _Optional[int] = ..., unflushed_blocks: _Optional[int] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ("fragmentation",)
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    fragmentation: float
    def __init__(self, fragmentation: _Optional[float] = ...) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ("segments", "bytes_rewritten", "bytes_freed")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_REWRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FREED_FIELD_NUMBER: _ClassVar[int]
    segments: int
    bytes_rewritten: int
    bytes_freed: int
    def __init__(self, segments: _Optional[int] = ..., bytes_rewritten: _Optional[int] = ..., bytes_freed: _Optional[int] = ...) -> None: ...

class DiskUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SegmentUsage(_message.Message):
    __slots__ = ("segment_id", "file_bytes", "live_bytes", "blocks", "open", "used_bytes")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    file_bytes: int
    live_bytes: int
    blocks: int
    open: bool
    used_bytes: int
    def __init__(self, segment_id: _Optional[int] = ..., file_bytes: _Optional[int] = ..., live_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., open: _Optional[bool] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class DiskUsageResponse(_message.Message):
    __slots__ = ("directory", "cap_bytes", "ledger_bytes", "free_floor_bytes", "filesystem_free_bytes", "quarantine_bytes", "metadata_bytes", "fragmentation", "write_amplification", "segments", "coded_saved_bytes")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILESYSTEM_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    WRITE_AMPLIFICATION_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CODED_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    directory: str
    cap_bytes: int
    ledger_bytes: int
    free_floor_bytes: int
    filesystem_free_bytes: int
    quarantine_bytes: int
    metadata_bytes: int
    fragmentation: float
    write_amplification: float
    segments: _containers.RepeatedCompositeFieldContainer[SegmentUsage]
    coded_saved_bytes: int
    def __init__(self, directory: _Optional[str] = ..., cap_bytes: _Optional[int] = ..., ledger_bytes: _Optional[int] = ..., free_floor_bytes: _Optional[int] = ..., filesystem_free_bytes: _Optional[int] = ..., quarantine_bytes: _Optional[int] = ..., metadata_bytes: _Optional[int] = ..., fragmentation: _Optional[float] = ..., write_amplification: _Optional[float] = ..., segments: _Optional[_Iterable[_Union[SegmentUsage, _Mapping]]] = ..., coded_saved_bytes: _Optional[int] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ("empty",)
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    empty: bool
    def __init__(self, empty: _Optional[bool] = ...) -> None: ...

class QuarantineEntry(_message.Message):
    __slots__ = ("file", "bytes", "key", "cause")
    FILE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    file: str
    bytes: int
    key: bytes
    cause: str
    def __init__(self, file: _Optional[str] = ..., bytes: _Optional[int] = ..., key: _Optional[bytes] = ..., cause: _Optional[str] = ...) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("entries", "emptied")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    EMPTIED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[QuarantineEntry]
    emptied: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[QuarantineEntry, _Mapping]]] = ..., emptied: _Optional[bool] = ...) -> None: ...
