from kvstore.v1 import cache_pb2 as _cache_pb2
from kvstore.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "name", "buffer_bytes", "device", "plans", "index")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    buffer_bytes: int
    device: bool
    plans: bool
    index: bool
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., buffer_bytes: _Optional[int] = ..., device: _Optional[bool] = ..., plans: _Optional[bool] = ..., index: _Optional[bool] = ...) -> None: ...

class ArenaInfo(_message.Message):
    __slots__ = ("area", "bytes", "writable", "kind", "device", "cuda_ipc_handle", "versions_offset")
    AREA_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    area: _common_pb2.Area
    bytes: int
    writable: bool
    kind: str
    device: int
    cuda_ipc_handle: bytes
    versions_offset: int
    def __init__(self, area: _Optional[_Union[_common_pb2.Area, str]] = ..., bytes: _Optional[int] = ..., writable: _Optional[bool] = ..., kind: _Optional[str] = ..., device: _Optional[int] = ..., cuda_ipc_handle: _Optional[bytes] = ..., versions_offset: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "boot_id", "token", "arenas", "version", "plan_bell", "index")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_BELL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_id: bytes
    token: bytes
    arenas: _containers.RepeatedCompositeFieldContainer[ArenaInfo]
    version: str
    plan_bell: bool
    index: bool
    def __init__(self, protocol_version: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., token: _Optional[bytes] = ..., arenas: _Optional[_Iterable[_Union[ArenaInfo, _Mapping]]] = ..., version: _Optional[str] = ..., plan_bell: _Optional[bool] = ..., index: _Optional[bool] = ...) -> None: ...

class JobDone(_message.Message):
    __slots__ = ("job_id", "result")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    result: _cache_pb2.FetchResponse
    def __init__(self, job_id: _Optional[int] = ..., result: _Optional[_Union[_cache_pb2.FetchResponse, _Mapping]] = ...) -> None: ...

class OpenRemoteRequest(_message.Message):
    __slots__ = ("name", "ttl_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl_ms: int
    def __init__(self, name: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class OpenRemoteResponse(_message.Message):
    __slots__ = ("token", "boot_id", "ttl_ms", "writes_max")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WRITES_MAX_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    boot_id: bytes
    ttl_ms: int
    writes_max: int
    def __init__(self, token: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., writes_max: _Optional[int] = ...) -> None: ...

class KeepaliveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepaliveResponse(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class CloseRemoteRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseRemoteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
