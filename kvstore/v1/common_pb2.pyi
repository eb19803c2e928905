from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_MISS: _ClassVar[Outcome]
    OUTCOME_PENDING: _ClassVar[Outcome]
    OUTCOME_BUSY: _ClassVar[Outcome]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_NEVER_STORED: _ClassVar[Reason]
    REASON_EVICTED: _ClassVar[Reason]
    REASON_REMOVED: _ClassVar[Reason]
    REASON_QUARANTINED: _ClassVar[Reason]
    REASON_UNCOMMITTED: _ClassVar[Reason]
    REASON_DROPPED: _ClassVar[Reason]
    REASON_TIER_UNAVAILABLE: _ClassVar[Reason]
    REASON_PARENT_MISSING: _ClassVar[Reason]
    REASON_NO_SPACE: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_DRAINING: _ClassVar[Reason]

class Area(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AREA_UNSPECIFIED: _ClassVar[Area]
    AREA_DEVICE: _ClassVar[Area]
    AREA_HOST: _ClassVar[Area]
    AREA_BUFFER: _ClassVar[Area]

class WritePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_POLICY_UNSPECIFIED: _ClassVar[WritePolicy]
    WRITE_POLICY_THROUGH: _ClassVar[WritePolicy]
    WRITE_POLICY_BACK: _ClassVar[WritePolicy]
    WRITE_POLICY_SECOND_HIT: _ClassVar[WritePolicy]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_DURABLE: _ClassVar[Durability]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_SSD: Tier
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_HIT: Outcome
OUTCOME_MISS: Outcome
OUTCOME_PENDING: Outcome
OUTCOME_BUSY: Outcome
REASON_UNSPECIFIED: Reason
REASON_NEVER_STORED: Reason
REASON_EVICTED: Reason
REASON_REMOVED: Reason
REASON_QUARANTINED: Reason
REASON_UNCOMMITTED: Reason
REASON_DROPPED: Reason
REASON_TIER_UNAVAILABLE: Reason
REASON_PARENT_MISSING: Reason
REASON_NO_SPACE: Reason
REASON_DEADLINE: Reason
REASON_DRAINING: Reason
AREA_UNSPECIFIED: Area
AREA_DEVICE: Area
AREA_HOST: Area
AREA_BUFFER: Area
WRITE_POLICY_UNSPECIFIED: WritePolicy
WRITE_POLICY_THROUGH: WritePolicy
WRITE_POLICY_BACK: WritePolicy
WRITE_POLICY_SECOND_HIT: WritePolicy
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_DURABLE: Durability

class Places(_message.Message):
    __slots__ = ("areas", "offsets", "strides", "codecs", "versions")
    AREAS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    areas: _containers.RepeatedScalarFieldContainer[Area]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    codecs: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, areas: _Optional[_Iterable[_Union[Area, str]]] = ..., offsets: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., codecs: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class BusyInfo(_message.Message):
    __slots__ = ("tier", "needed_bytes", "free_bytes", "evictable_bytes", "reason")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    needed_bytes: int
    free_bytes: int
    evictable_bytes: int
    reason: Reason
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., needed_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("model", "revision", "dtype", "layers", "kv_heads", "head_dim", "block_tokens", "rope", "layout_version", "codec", "shard_index", "shard_count", "salt", "opaque_slice_bytes", "extra", "raw_layers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_SLICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    RAW_LAYERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    rope: str
    layout_version: int
    codec: str
    shard_index: int
    shard_count: int
    salt: bytes
    opaque_slice_bytes: int
    extra: str
    raw_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., rope: _Optional[str] = ..., layout_version: _Optional[int] = ..., codec: _Optional[str] = ..., shard_index: _Optional[int] = ..., shard_count: _Optional[int] = ..., salt: _Optional[bytes] = ..., opaque_slice_bytes: _Optional[int] = ..., extra: _Optional[str] = ..., raw_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class NamespacePolicy(_message.Message):
    __slots__ = ("write", "durability", "raw_first_tokens", "lossless", "device_codec")
    WRITE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    RAW_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_CODEC_FIELD_NUMBER: _ClassVar[int]
    write: WritePolicy
    durability: Durability
    raw_first_tokens: int
    lossless: str
    device_codec: str
    def __init__(self, write: _Optional[_Union[WritePolicy, str]] = ..., durability: _Optional[_Union[Durability, str]] = ..., raw_first_tokens: _Optional[int] = ..., lossless: _Optional[str] = ..., device_codec: _Optional[str] = ...) -> None: ...

class BlockLayout(_message.Message):
    __slots__ = ("layers", "slice_bytes", "slice_stride", "raw_slice_bytes", "raw_slice_stride", "header_bytes", "stored_bytes", "device_bytes", "raw_layers", "raw_layer_units")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SLICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLICE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    RAW_SLICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_SLICE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_LAYERS_FIELD_NUMBER: _ClassVar[int]
    RAW_LAYER_UNITS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    slice_bytes: int
    slice_stride: int
    raw_slice_bytes: int
    raw_slice_stride: int
    header_bytes: int
    stored_bytes: int
    device_bytes: int
    raw_layers: _containers.RepeatedScalarFieldContainer[int]
    raw_layer_units: int
    def __init__(self, layers: _Optional[int] = ..., slice_bytes: _Optional[int] = ..., slice_stride: _Optional[int] = ..., raw_slice_bytes: _Optional[int] = ..., raw_slice_stride: _Optional[int] = ..., header_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., raw_layers: _Optional[_Iterable[int]] = ..., raw_layer_units: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "field", "value", "expected")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    field: str
    value: str
    expected: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., expected: _Optional[str] = ...) -> None: ...
