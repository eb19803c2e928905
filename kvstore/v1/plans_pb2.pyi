from kvstore.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanKeys(_message.Message):
    __slots__ = ("outcomes", "reasons", "residency")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.Reason]
    residency: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., reasons: _Optional[_Iterable[_Union[_common_pb2.Reason, str]]] = ..., residency: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenPlanRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "layer_begin", "layer_end", "piece_bytes", "pieces", "idle_ms")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    layer_begin: int
    layer_end: int
    piece_bytes: int
    pieces: int
    idle_ms: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., pieces: _Optional[int] = ..., idle_ms: _Optional[int] = ...) -> None: ...

class OpenPlanResponse(_message.Message):
    __slots__ = ("plan_id", "keys", "ring_offset", "slot_bytes", "ring_version")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RING_VERSION_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    keys: PlanKeys
    ring_offset: int
    slot_bytes: int
    ring_version: int
    def __init__(self, plan_id: _Optional[int] = ..., keys: _Optional[_Union[PlanKeys, _Mapping]] = ..., ring_offset: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., ring_version: _Optional[int] = ...) -> None: ...

class ExtendPlanRequest(_message.Message):
    __slots__ = ("plan_id", "keys")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    keys: bytes
    def __init__(self, plan_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ExtendPlanResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: PlanKeys
    def __init__(self, keys: _Optional[_Union[PlanKeys, _Mapping]] = ...) -> None: ...

class AdvancePlanRequest(_message.Message):
    __slots__ = ("plan_id", "layer_begin", "layer_end", "blocks", "some", "drop")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOME_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    layer_begin: int
    layer_end: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    some: bool
    drop: bool
    def __init__(self, plan_id: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., some: _Optional[bool] = ..., drop: _Optional[bool] = ...) -> None: ...

class AdvancePlanResponse(_message.Message):
    __slots__ = ("number", "pieces")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    number: int
    pieces: int
    def __init__(self, number: _Optional[int] = ..., pieces: _Optional[int] = ...) -> None: ...

class ClosePlanRequest(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    def __init__(self, plan_id: _Optional[int] = ...) -> None: ...

class ClosePlanResponse(_message.Message):
    __slots__ = ("ended",)
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ended: bool
    def __init__(self, ended: _Optional[bool] = ...) -> None: ...
