"""Blocks of bf16 as a model makes them, blocks of noise, and how streams carry them; for tests of coded chunks."""

from __future__ import annotations

import itertools

import numpy as np

from kvstore.client import PutBlocks
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Outcome
from kvstore.v1 import cache_pb2

_salts = itertools.count()
WRITE, READ = "kvstore.v1.Cache/Write", "kvstore.v1.Cache/Read"
LZ4 = NamespacePolicy(lossless="lz4")
TOKENS = 16


def spec_of(dtype="bfloat16", **changes) -> NamespaceSpec:
    """Blocks of three layers of 32 KiB each, of 16 bits a number."""
    fields = {"model": "coded", "layers": 3, "kv_heads": 4, "head_dim": 128, "block_tokens": TOKENS}
    return NamespaceSpec(dtype=dtype, salt=str(next(_salts)).encode(), **{**fields, **changes})


def kv_of(spec: NamespaceSpec, seed: int) -> bytes:
    """A block as a model makes it: channels of K keep near a mean of their own, V is noise around zero."""
    if spec.opaque_slice_bytes:
        return np.random.default_rng(seed).bytes(spec.layers * spec.opaque_slice_bytes)
    draw = np.random.default_rng(seed)
    shape = (spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens)
    keys = draw.normal(0, 3, (*shape[:3], 1)) + draw.normal(0, 0.3, shape)
    values = draw.normal(0, 0.5, shape)
    both = np.concatenate([part.reshape(*shape[:2], -1) for part in (keys, values)], axis=2).astype(np.float32)
    if spec.dtype == "bfloat16":
        return (both.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return both.astype(spec.dtype).tobytes()


def noise_of(spec: NamespaceSpec, seed: int) -> bytes:
    """Numbers of no kind: finite, since their top bit but one is clear, and without anything to save."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(len(kv_of(spec, 0))), np.uint8).copy()
    data[1::2] &= 0xBF
    return data.tobytes()


def chain(namespace_id, count, seed=0):
    return chain_keys(namespace_id, range(seed * 100_000, seed * 100_000 + count * TOKENS), TOKENS)


def read_chunks(client, namespace_id, keys, **fields):
    request = cache_pb2.ReadRequest(namespace_id=namespace_id, keys=b"".join(keys), **fields).SerializeToString()
    return [cache_pb2.ReadChunk.FromString(m) for m in client.connection()[0].stream(READ, request, 20.0)]


def put(client, opened, keys, payloads):
    blocks = PutBlocks(keys, parents_of(keys), payloads)
    assert client.put(opened.namespace_id, blocks).outcomes == (Outcome.HIT,) * len(keys)
