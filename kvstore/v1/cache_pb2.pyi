from kvstore.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Target(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TARGET_UNSPECIFIED: _ClassVar[Target]
    TARGET_IN_PLACE: _ClassVar[Target]
    TARGET_DEVICE: _ClassVar[Target]
    TARGET_HOST: _ClassVar[Target]
    TARGET_BUFFER: _ClassVar[Target]

class Coding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODING_UNSPECIFIED: _ClassVar[Coding]
    CODING_LZ4: _ClassVar[Coding]
TARGET_UNSPECIFIED: Target
TARGET_IN_PLACE: Target
TARGET_DEVICE: Target
TARGET_HOST: Target
TARGET_BUFFER: Target
CODING_UNSPECIFIED: Coding
CODING_LZ4: Coding

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("spec", "name", "policy", "expected_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ID_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.NamespaceSpec
    name: str
    policy: _common_pb2.NamespacePolicy
    expected_id: bytes
    def __init__(self, spec: _Optional[_Union[_common_pb2.NamespaceSpec, _Mapping]] = ..., name: _Optional[str] = ..., policy: _Optional[_Union[_common_pb2.NamespacePolicy, _Mapping]] = ..., expected_id: _Optional[bytes] = ...) -> None: ...

class NearNamespace(_message.Message):
    __slots__ = ("namespace_id", "fields", "blocks")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    fields: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., fields: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "layout", "created", "near", "boot_id", "write_codings", "storage_bytes", "number")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_CODINGS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    layout: _common_pb2.BlockLayout
    created: bool
    near: _containers.RepeatedCompositeFieldContainer[NearNamespace]
    boot_id: bytes
    write_codings: _containers.RepeatedScalarFieldContainer[Coding]
    storage_bytes: int
    number: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., layout: _Optional[_Union[_common_pb2.BlockLayout, _Mapping]] = ..., created: _Optional[bool] = ..., near: _Optional[_Iterable[_Union[NearNamespace, _Mapping]]] = ..., boot_id: _Optional[bytes] = ..., write_codings: _Optional[_Iterable[_Union[Coding, str]]] = ..., storage_bytes: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "mapped")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    mapped: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., mapped: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("matched", "residency", "reason", "near")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    matched: int
    residency: _containers.RepeatedScalarFieldContainer[int]
    reason: _common_pb2.Reason
    near: _containers.RepeatedCompositeFieldContainer[NearNamespace]
    def __init__(self, matched: _Optional[int] = ..., residency: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., near: _Optional[_Iterable[_Union[NearNamespace, _Mapping]]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace_id", "tier", "keys", "count", "durability", "standing", "whole")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tier: _common_pb2.Tier
    keys: bytes
    count: int
    durability: _common_pb2.Durability
    standing: bool
    whole: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., keys: _Optional[bytes] = ..., count: _Optional[int] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., standing: _Optional[bool] = ..., whole: _Optional[bool] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("outcomes", "reservation_ids", "places", "busy", "standing")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    places: _common_pb2.Places
    busy: _common_pb2.BusyInfo
    standing: bool
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., reservation_ids: _Optional[_Iterable[int]] = ..., places: _Optional[_Union[_common_pb2.Places, _Mapping]] = ..., busy: _Optional[_Union[_common_pb2.BusyInfo, _Mapping]] = ..., standing: _Optional[bool] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("namespace_id", "reservation_ids", "keys", "parents", "token_ids", "durability", "lease_id")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    parents: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    durability: _common_pb2.Durability
    lease_id: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., reservation_ids: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("outcomes", "reasons", "existed", "places", "busy")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.Reason]
    existed: _containers.RepeatedScalarFieldContainer[int]
    places: _common_pb2.Places
    busy: _common_pb2.BusyInfo
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., reasons: _Optional[_Iterable[_Union[_common_pb2.Reason, str]]] = ..., existed: _Optional[_Iterable[int]] = ..., places: _Optional[_Union[_common_pb2.Places, _Mapping]] = ..., busy: _Optional[_Union[_common_pb2.BusyInfo, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_ids",)
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "unknown")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    unknown: int
    def __init__(self, aborted: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "target", "layer_begin", "layer_end", "lease_id", "wait_ms")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    target: Target
    layer_begin: int
    layer_end: int
    lease_id: int
    wait_ms: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., target: _Optional[_Union[Target, str]] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., lease_id: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("outcomes", "reasons", "places", "job_id", "busy")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.Reason]
    places: _common_pb2.Places
    job_id: int
    busy: _common_pb2.BusyInfo
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., reasons: _Optional[_Iterable[_Union[_common_pb2.Reason, str]]] = ..., places: _Optional[_Union[_common_pb2.Places, _Mapping]] = ..., job_id: _Optional[int] = ..., busy: _Optional[_Union[_common_pb2.BusyInfo, _Mapping]] = ...) -> None: ...

class WaitJobRequest(_message.Message):
    __slots__ = ("job_id", "timeout_ms")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    timeout_ms: int
    def __init__(self, job_id: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "tier")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    tier: _common_pb2.Tier
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("blocks", "bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ChunkCoding(_message.Message):
    __slots__ = ("coding", "plain_bytes", "planes")
    CODING_FIELD_NUMBER: _ClassVar[int]
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    coding: Coding
    plain_bytes: int
    planes: int
    def __init__(self, coding: _Optional[_Union[Coding, str]] = ..., plain_bytes: _Optional[int] = ..., planes: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "layer_begin", "layer_end", "accept")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    layer_begin: int
    layer_end: int
    accept: _containers.RepeatedScalarFieldContainer[Coding]
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., accept: _Optional[_Iterable[_Union[Coding, str]]] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("key_index", "outcome", "reason", "offset", "data", "crc32c", "codec", "coded")
    KEY_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODED_FIELD_NUMBER: _ClassVar[int]
    key_index: int
    outcome: _common_pb2.Outcome
    reason: _common_pb2.Reason
    offset: int
    data: bytes
    crc32c: int
    codec: int
    coded: ChunkCoding
    def __init__(self, key_index: _Optional[int] = ..., outcome: _Optional[_Union[_common_pb2.Outcome, str]] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., codec: _Optional[int] = ..., coded: _Optional[_Union[ChunkCoding, _Mapping]] = ...) -> None: ...

class WriteHeader(_message.Message):
    __slots__ = ("namespace_id", "keys", "parents", "token_ids", "durability")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    parents: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    durability: _common_pb2.Durability
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ...) -> None: ...

class WriteChunk(_message.Message):
    __slots__ = ("header", "key_index", "offset", "data", "crc32c", "coded")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    CODED_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    key_index: int
    offset: int
    data: bytes
    crc32c: int
    coded: ChunkCoding
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., key_index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., coded: _Optional[_Union[ChunkCoding, _Mapping]] = ...) -> None: ...
