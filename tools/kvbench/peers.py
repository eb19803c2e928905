"""Figures that others reach, as published for this kind of machine (2 AVX2 cores, no GPU); nothing here is measured.

MB/s of one same-host client, medians, random bytes; milliseconds for calls.
"""

from __future__ import annotations

from typing import Final

GET_16_MIB: Final = {
    "Mooncake Store, shared memory": 6450.0,
    "LMCache daemon, ZMQ and shm": 1770.0,
    "LMCache, in process": 8110.0,
    "lmdb, warm": 6410.0,
    "Redis, Unix socket": 840.0,
    "grpc.aio, bytes in messages": 950.0,
}
PUT_16_MIB: Final = {
    "Mooncake Store, shared memory": 5640.0,
    "LMCache daemon, ZMQ and shm": 2130.0,
    "LMCache, in process": 4860.0,
    "lmdb, no sync": 2770.0,
    "Redis, Unix socket": 610.0,
    "grpc.aio, bytes in messages": 720.0,
}
EXISTS_512_P50_MS: Final = {"lmdb": 0.17, "Redis": 0.58, "Mooncake": 0.64, "bare gRPC": 0.93, "LMCache daemon": 17.0}
EXISTS_512_P99_MS: Final = {"lmdb": 0.29, "Redis": 0.86, "Mooncake": 1.3, "bare gRPC": 1.7, "LMCache daemon": 30.0}
CALL_64_P50_MS: Final = {"grpc sync": 1.017, "grpc.aio": 1.094, "gRPC stream": 0.44, "raw Unix socket": 0.156}
DISK_READ_1_MIB: Final = {
    "lmdb with readahead": 750.0,
    "LMCache local disk": 740.0,
    "rocksdict": 405.0,
    "file per block": 640.0,
}
