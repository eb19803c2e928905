from kvstore.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_GAP: _ClassVar[EventKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_GAP: EventKind

class SubscribeRequest(_message.Message):
    __slots__ = ("namespace_id", "after_sequence")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    after_sequence: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("sequence", "unix_seconds", "kind", "tier", "namespace_id", "keys", "parents", "token_ids", "block_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unix_seconds: float
    kind: EventKind
    tier: _common_pb2.Tier
    namespace_id: bytes
    keys: bytes
    parents: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., kind: _Optional[_Union[EventKind, str]] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ...) -> None: ...
