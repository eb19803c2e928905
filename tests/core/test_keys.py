"""Namespace ids and block keys against golden vectors, and against a second implementation written from the prose."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import block_key, chain_keys, foreign_chain, foreign_key, parents_of, split_keys
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import ROOT_PARENT, BlockKey, NamespaceId

GOLDEN = json.loads(Path(__file__).with_name("golden_keys.json").read_text())


def spec_of(row: dict) -> NamespaceSpec:
    spec = row["spec"]
    return NamespaceSpec(
        **{**spec, "salt": bytes.fromhex(spec["salt"]), "raw_layers": tuple(spec.get("raw_layers", ()))}
    )


def by_hand_namespace(spec: dict) -> bytes:
    """The rule of docs/protocol.md in its own words: tag, then each field as u32 length and bytes."""
    message = bytearray(b"kvstore.namespace.v1\x00")
    for name in (
        "model", "revision", "dtype", "layers", "kv_heads", "head_dim", "block_tokens", "rope", "layout_version",
        "codec", "shard_index", "shard_count", "salt", "opaque_slice_bytes", "extra",
    ):  # fmt: skip
        value = spec[name]
        if name == "salt":
            data = bytes.fromhex(value)
        elif isinstance(value, int):
            data = bytes((value >> (8 * i)) & 0xFF for i in range(8))
        else:
            data = value.encode("utf-8")
        message += bytes((len(data) >> (8 * i)) & 0xFF for i in range(4))
        message += data
    if spec.get("raw_layers"):
        layers = b"".join(layer.to_bytes(4, "little") for layer in spec["raw_layers"])
        message += len(layers).to_bytes(4, "little") + layers
    return hashlib.sha256(bytes(message)).digest()


def by_hand_chain(namespace: bytes, parent: bytes, tokens: list[int], size: int) -> list[bytes]:
    keys = []
    for begin in range(0, len(tokens) - size + 1, size):
        packed = b"".join(t.to_bytes(4, "little") for t in tokens[begin : begin + size])
        parent = hashlib.sha256(b"kvstore.block.v1\x00" + namespace + parent + packed).digest()
        keys.append(parent)
    return keys


@pytest.mark.parametrize("row", GOLDEN["namespaces"], ids=lambda row: row["namespace_id"][:8])
def test_golden_namespaces(row):
    assert spec_of(row).namespace_id.hex() == row["namespace_id"] == by_hand_namespace(row["spec"]).hex()


@pytest.mark.parametrize("row", GOLDEN["chains"], ids=lambda row: row["name"])
def test_golden_chains(row):
    spec = spec_of(GOLDEN["namespaces"][row["namespace"]])
    parent = BlockKey(bytes.fromhex(row["parent"]))
    keys = chain_keys(spec.namespace_id, row["token_ids"], spec.block_tokens, parent)
    assert [key.hex() for key in keys] == row["keys"]
    assert keys == by_hand_chain(spec.namespace_id, parent, row["token_ids"], spec.block_tokens)


def test_there_are_enough_vectors_and_they_differ():
    assert len(GOLDEN["namespaces"]) >= 12
    assert len(GOLDEN["chains"]) >= 12
    ids = [row["namespace_id"] for row in GOLDEN["namespaces"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("seed", range(20))
def test_the_two_implementations_agree_on_random_chains(seed):
    chance = random.Random(seed)
    namespace = NamespaceId(chance.randbytes(32))
    size = chance.choice([1, 2, 16, 64])
    tokens = [chance.choice([0, 1, 255, 256, 2**31, 2**32 - 1, chance.getrandbits(32)]) for _ in range(5 * size)]
    parent = BlockKey(chance.randbytes(32))
    keys = chain_keys(namespace, tokens, size, parent)
    assert keys == by_hand_chain(namespace, parent, tokens, size)
    walk = parent
    for i, key in enumerate(keys):
        walk = block_key(namespace, walk, tokens[i * size : (i + 1) * size])
        assert walk == key
    assert chain_keys(namespace, np.array(tokens, dtype=np.uint32), size, parent) == keys
    assert parents_of(keys, parent) == [parent, *keys[:-1]]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_hash_seed_or_locale(seed):
    code = (
        "from kvstore.core.keys import chain_keys; from kvstore.core.namespace import NamespaceSpec as S;"
        "n = S(model='mod\\u00e8le', dtype='float16', layers=2, kv_heads=1, head_dim=8).namespace_id;"
        "print(n.hex(), [k.hex() for k in chain_keys(n, range(128), 64)])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": value, "LC_ALL": locale},
        ).stdout
        for value, locale in ((seed, "C"), ("77", "C.UTF-8"))
    ]  # fmt: skip
    assert told[0] == told[1]


def test_every_field_changes_the_id_and_is_named():
    spec = NamespaceSpec(model="m", dtype="float16", layers=2, kv_heads=2, head_dim=8, shard_count=4)
    changes = {
        "model": "n", "revision": "r", "dtype": "bfloat16", "layers": 3, "kv_heads": 3, "head_dim": 16,
        "block_tokens": 32, "rope": '{"a":1}', "codec": "int8", "shard_index": 1, "shard_count": 5, "salt": b"s",
        "opaque_slice_bytes": 512, "extra": '{"b":2}',
    }  # fmt: skip
    assert set(changes) == {f.name for f in fields(spec)} - {"layout_version", "raw_layers"}
    ids = {spec.namespace_id}
    for name, value in changes.items():
        other = replace(spec, **{name: value})
        assert spec.differing_fields(other) == (name,)
        ids.add(other.namespace_id)
    coded = replace(spec, codec="int8")
    for layers in ((0,), (1,), (0, 1)):
        other = replace(coded, raw_layers=layers)
        assert coded.differing_fields(other) == ("raw_layers",)
        ids.add(other.namespace_id)
    assert len(ids) == len(changes) + 4


def test_fields_do_not_run_into_each_other():
    a = NamespaceSpec(model="ab", revision="c", dtype="float16", layers=1, kv_heads=1, head_dim=8)
    b = NamespaceSpec(model="a", revision="bc", dtype="float16", layers=1, kv_heads=1, head_dim=8)
    assert a.namespace_id != b.namespace_id


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "spec.model"),
        ({"dtype": "float64"}, "spec.dtype"),
        ({"layers": 0}, "spec.layers"),
        ({"kv_heads": 4097}, "spec.kv_heads"),
        ({"head_dim": -1}, "spec.head_dim"),
        ({"block_tokens": 0}, "spec.block_tokens"),
        ({"rope": '{"b":1, "a":2}'}, "spec.rope"),
        ({"rope": "{"}, "spec.rope"),
        ({"extra": '{"b":1,"a":2}'}, "spec.extra"),
        ({"codec": "no such codec"}, "spec.codec"),
        ({"shard_index": 1}, "spec.shard_index"),
        ({"layout_version": 2}, "spec.layout_version"),
        ({"salt": b"x" * 16385}, "spec.salt"),
        ({"opaque_slice_bytes": 512, "codec": "int8"}, "spec.codec"),
        ({"raw_layers": (0,)}, "spec.raw_layers"),
        ({"codec": "int8", "raw_layers": (1, 0)}, "spec.raw_layers"),
        ({"codec": "int8", "raw_layers": (1, 1)}, "spec.raw_layers"),
        ({"codec": "int8", "raw_layers": (2,)}, "spec.raw_layers"),
        ({"codec": "int8", "raw_layers": (-1,)}, "spec.raw_layers"),
        ({"layers": 1024, "kv_heads": 64, "head_dim": 256, "block_tokens": 4096}, "spec"),
    ],
)
def test_bad_specs_name_the_field(change, field):
    good = {"model": "m", "dtype": "float16", "layers": 2, "kv_heads": 2, "head_dim": 8}
    with pytest.raises(InvalidArgument) as caught:
        NamespaceSpec(**{**good, **change})
    assert caught.value.field == field


@pytest.mark.parametrize("tokens", [[-1], [2**32], [[1, 2]], ["a"], [None]])
def test_bad_tokens(tokens):
    with pytest.raises(InvalidArgument, match="token_ids"):
        block_key(NamespaceId(bytes(32)), ROOT_PARENT, tokens)


def test_packed_keys():
    keys = [BlockKey(bytes([i]) * 32) for i in range(3)]
    assert split_keys("keys", b"".join(keys)) == keys
    assert split_keys("keys", b"") == []
    with pytest.raises(InvalidArgument, match="keys is 33 bytes"):
        split_keys("keys", bytes(33))


@pytest.mark.parametrize("row", GOLDEN["foreign"])
def test_golden_foreign_keys(row):
    assert (
        foreign_key(NamespaceId(bytes.fromhex(row["namespace_id"])), bytes.fromhex(row["digest"])).hex() == row["key"]
    )


def test_a_foreign_digest_is_another_key_in_another_namespace_and_never_a_key_of_tokens():
    one, two = NamespaceId(bytes(32)), NamespaceId(bytes([1]) * 32)
    tokens = np.arange(16, dtype="<u4")
    assert len({row["key"] for row in GOLDEN["foreign"]}) == len(GOLDEN["foreign"]) >= 12
    assert foreign_key(one, b"digest") != foreign_key(two, b"digest")
    assert foreign_key(one, ROOT_PARENT + tokens.tobytes()) != block_key(one, ROOT_PARENT, tokens)


def test_a_chain_of_foreign_digests_names_its_parents():
    namespace, root = NamespaceId(bytes([2]) * 32), BlockKey(bytes([7]) * 32)
    keys, parents = foreign_chain(namespace, [b"a", b"b", b"c"], root)
    assert keys == [foreign_key(namespace, digest) for digest in (b"a", b"b", b"c")]
    assert parents == [root, *keys[:2]]
    assert foreign_chain(namespace, []) == ([], [])


@pytest.mark.parametrize("digest", [b"", bytes(1025)])
def test_a_digest_that_is_none_is_refused(digest):
    with pytest.raises(InvalidArgument, match="digest"):
        foreign_key(NamespaceId(bytes(32)), digest)
