"""Namespaces, keys and payloads that benches store."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey

BLOCK_BYTES = 1 << 20


def opaque_spec(name: str, layers: int = 1, block_bytes: int = BLOCK_BYTES) -> NamespaceSpec:
    """Blocks of ``block_bytes`` random bytes in ``layers`` slices, in a namespace that no other run shares."""
    return NamespaceSpec(
        model=f"kvbench-{name}",
        revision=os.urandom(8).hex(),
        dtype="opaque",
        layers=layers,
        kv_heads=1,
        head_dim=1,
        block_tokens=64,
        opaque_slice_bytes=block_bytes // layers,
    )


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of consecutive blocks, each with its parent."""

    keys: list[BlockKey]
    parents: list[BlockKey]

    @classmethod
    def fresh(cls, spec: NamespaceSpec, blocks: int, start: int = 0) -> Chain:
        """A chain that no other ``start`` shares a block with."""
        tokens = [start, *range(1, blocks * spec.block_tokens)]
        keys = chain_keys(spec.namespace_id, tokens, spec.block_tokens)
        return cls(keys, parents_of(keys))
