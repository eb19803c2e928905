"""Block keys: chained SHA-256 over namespace, parent key and token ids.

``block_key = SHA-256(BLOCK_TAG || namespace_id || parent_key || token ids as little-endian u32)``, the
parent of a root being 32 zero bytes. An engine that hashes blocks itself has ``foreign_key = SHA-256(FOREIGN_TAG ||
namespace_id || digest)`` instead. The same in every process, language and restart; ``docs/protocol.md`` has golden
vectors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, ROOT_PARENT, BlockKey, NamespaceId

BLOCK_TAG: Final = b"kvstore.block.v1\x00"
FOREIGN_TAG: Final = b"kvstore.foreign.v1\x00"
DIGEST_BYTES_MAX: Final = 1024


def block_key(namespace: NamespaceId, parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of one block. ``token_ids`` are the block's tokens, each 0 to 2**32 - 1."""
    return BlockKey(hashlib.sha256(BLOCK_TAG + namespace + parent + _pack(token_ids)).digest())


def chain_keys(
    namespace: NamespaceId, token_ids: Sequence[int], block_tokens: int, parent: BlockKey = ROOT_PARENT
) -> list[BlockKey]:
    """Keys of the full blocks of a token sequence, in order; a last partial block has no key."""
    data = memoryview(_pack(token_ids))
    step = 4 * block_tokens
    head = BLOCK_TAG + namespace
    keys: list[BlockKey] = []
    for begin in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(head)
        digest.update(parent)
        digest.update(data[begin : begin + step])
        parent = BlockKey(digest.digest())
        keys.append(parent)
    return keys


def parents_of(keys: Sequence[BlockKey], parent: BlockKey = ROOT_PARENT) -> list[BlockKey]:
    """Parents of the keys of one consecutive chain whose first block follows ``parent``."""
    return [parent, *keys[:-1]] if keys else []


def foreign_key(namespace: NamespaceId, digest: bytes) -> BlockKey:
    """Key of a block that an engine names by a hash of its own, 1 to 1,024 bytes; InvalidArgument for other lengths.

    Such a hash often says nothing of dtype, shard or layout. With the namespace inside, the same hash in two namespaces
    is two keys, and none of them is a key of ``block_key``. The hash has to stand for the block's whole prefix.
    """
    if not 1 <= len(digest) <= DIGEST_BYTES_MAX:
        raise InvalidArgument("digest", f"{len(digest)} bytes", f"1 to {DIGEST_BYTES_MAX} bytes")
    return BlockKey(hashlib.sha256(FOREIGN_TAG + namespace + digest).digest())


def foreign_chain(
    namespace: NamespaceId, digests: Sequence[bytes], parent: BlockKey = ROOT_PARENT
) -> tuple[list[BlockKey], list[BlockKey]]:
    """Keys of consecutive blocks that an engine has hashed, and their parents, the first of which is ``parent``.

    A foreign key does not have its parent inside: who puts the blocks names the parents beside the keys.
    """
    keys = [foreign_key(namespace, digest) for digest in digests]
    return keys, parents_of(keys, parent)


def split_keys(field: str, packed: bytes) -> list[BlockKey]:
    """Cut packed keys apart; raises InvalidArgument naming ``field`` if the length is not a multiple of 32."""
    if len(packed) % KEY_BYTES:
        raise InvalidArgument(field, f"{len(packed)} bytes", f"a multiple of {KEY_BYTES} bytes, {KEY_BYTES} a key")
    return list(struct.unpack(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES), packed))


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        given = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument("token_ids", type(token_ids).__name__, "a flat sequence of integers") from error
    if given.ndim != 1:
        raise InvalidArgument("token_ids", f"{given.ndim} dimensions", "a flat sequence of integers")
    if not given.size:
        return b""
    if given.dtype.kind not in "iu":
        # 1.2 and 1.9 must not become the same key, nor may True be 1.
        wrong = next((i for i, token in enumerate(token_ids) if not _is_integer(token)), 0)
        raise InvalidArgument(f"token_ids[{wrong}]", repr(token_ids[wrong])[:80], "an integer, 0 to 4294967295")
    if int(given.min()) < 0 or int(given.max()) > 0xFFFFFFFF:
        wrong = int(np.flatnonzero((given < 0) | (given > 0xFFFFFFFF))[0])
        raise InvalidArgument(f"token_ids[{wrong}]", int(given[wrong]), "0 to 4294967295")
    return given.astype("<u4").tobytes()


def _is_integer(token: object) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= int(token) <= 0xFFFFFFFF
