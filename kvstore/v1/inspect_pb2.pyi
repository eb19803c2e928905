from kvstore.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplainRequest(_message.Message):
    __slots__ = ("namespace_id", "key_prefix")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key_prefix: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., key_prefix: _Optional[bytes] = ...) -> None: ...

class CopyExplained(_message.Message):
    __slots__ = ("tier", "bytes", "fate", "kept", "colder", "of")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    COLDER_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    bytes: int
    fate: str
    kept: _containers.RepeatedScalarFieldContainer[str]
    colder: int
    of: int
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., bytes: _Optional[int] = ..., fate: _Optional[str] = ..., kept: _Optional[_Iterable[str]] = ..., colder: _Optional[int] = ..., of: _Optional[int] = ...) -> None: ...

class Keeper(_message.Message):
    __slots__ = ("kind", "name", "owner", "pid", "seconds_left")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    owner: str
    pid: int
    seconds_left: float
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., owner: _Optional[str] = ..., pid: _Optional[int] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("key", "parent", "depth", "copies", "keepers", "children", "hits", "idle_seconds", "reason", "seconds_ago")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    depth: int
    copies: _containers.RepeatedCompositeFieldContainer[CopyExplained]
    keepers: _containers.RepeatedCompositeFieldContainer[Keeper]
    children: int
    hits: int
    idle_seconds: float
    reason: _common_pb2.Reason
    seconds_ago: float
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[CopyExplained, _Mapping]]] = ..., keepers: _Optional[_Iterable[_Union[Keeper, _Mapping]]] = ..., children: _Optional[int] = ..., hits: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., reason: _Optional[_Union[_common_pb2.Reason, str]] = ..., seconds_ago: _Optional[float] = ...) -> None: ...

class TreeRequest(_message.Message):
    __slots__ = ("namespace_id", "limit")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    limit: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("level", "key", "blocks", "residency", "total_blocks", "total_bytes", "bytes_by_tier", "hits", "idle_seconds", "hidden")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    level: int
    key: bytes
    blocks: int
    residency: int
    total_blocks: int
    total_bytes: int
    bytes_by_tier: _containers.RepeatedScalarFieldContainer[int]
    hits: int
    idle_seconds: float
    hidden: int
    def __init__(self, level: _Optional[int] = ..., key: _Optional[bytes] = ..., blocks: _Optional[int] = ..., residency: _Optional[int] = ..., total_blocks: _Optional[int] = ..., total_bytes: _Optional[int] = ..., bytes_by_tier: _Optional[_Iterable[int]] = ..., hits: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., hidden: _Optional[int] = ...) -> None: ...

class TreeResponse(_message.Message):
    __slots__ = ("nodes", "blocks", "hidden")
    NODES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[TreeNode]
    blocks: int
    hidden: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ..., blocks: _Optional[int] = ..., hidden: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("namespace_id", "limit")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    limit: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ("removed", "kept", "left")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    removed: int
    kept: int
    left: int
    def __init__(self, removed: _Optional[int] = ..., kept: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class TraceEntry(_message.Message):
    __slots__ = ("unix_seconds", "namespace_id", "block_tokens", "prefix_ids", "matched")
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_IDS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    unix_seconds: float
    namespace_id: bytes
    block_tokens: int
    prefix_ids: _containers.RepeatedScalarFieldContainer[int]
    matched: int
    def __init__(self, unix_seconds: _Optional[float] = ..., namespace_id: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., prefix_ids: _Optional[_Iterable[int]] = ..., matched: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("entries", "sequence", "lost")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[TraceEntry]
    sequence: int
    lost: int
    def __init__(self, entries: _Optional[_Iterable[_Union[TraceEntry, _Mapping]]] = ..., sequence: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...
