"""Chunks coded for the wire: what comes back is what went in, smaller where it pays; nothing else is ever taken."""

from __future__ import annotations

import random

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import CorruptBlock
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Coding
from kvstore.v1 import cache_pb2
from kvstore.wire import chunks
from kvstore.wire.chunks import NO_PLANES, ChunkCoder, codings_of, plain_bytes, plain_data
from kvstore.wire.framing import CHUNK_BYTES_MAX


def smooth(nbytes: int, seed: int = 0) -> bytes:
    """Noise in the low bytes and few values in the high ones, as bf16 has."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()
    data[1::2] = 0x3F + data[1::2] % 2
    return data.tobytes()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def coded_chunk(data: bytes, planes: int = 2) -> cache_pb2.ReadChunk:
    chunk = cache_pb2.ReadChunk()
    ChunkCoder(planes).fill(chunk, data)
    return chunk


def test_the_policy_names_the_codings():
    assert codings_of(NamespacePolicy()) == []
    assert codings_of(NamespacePolicy(lossless="lz4")) == [Coding.LZ4]


@pytest.mark.parametrize("planes", [1, 2, 4])
@pytest.mark.parametrize("data", [smooth(4096), bytes(4096), noise(4096), smooth(CHUNK_BYTES_MAX)])
def test_plain_bytes_come_back(data, planes):
    chunk = coded_chunk(data, planes)
    assert plain_data(chunk, len(data)) == data
    assert plain_bytes(chunk) == len(data)
    assert chunk.crc32c == crc32c(data)


def test_a_chunk_is_coded_where_that_saves_a_twentieth_and_plain_elsewhere():
    smooth_chunk, noisy = coded_chunk(smooth(65536)), coded_chunk(noise(65536))
    assert smooth_chunk.HasField("coded")
    assert len(smooth_chunk.data) < 0.8 * 65536
    assert (noisy.HasField("coded"), noisy.data) == (False, noise(65536))
    assert not coded_chunk(smooth(65536), NO_PLANES).HasField("coded")
    # All but a fiftieth is noise: LZ4 would save something, and less than a twentieth.
    nearly = noise(64220) + bytes(1316)
    assert not coded_chunk(nearly, 1).HasField("coded")


def test_the_first_chunk_decides_for_its_block(monkeypatch):
    tried = []
    monkeypatch.setattr(chunks, "encode_slice", lambda data, planes: tried.append(planes) or data)
    coder = ChunkCoder(2)
    for offset in (0, CHUNK_BYTES_MAX, 2 * CHUNK_BYTES_MAX):
        coder.fill(cache_pb2.ReadChunk(offset=offset), noise(64))
    assert tried == [2]


def test_a_later_chunk_that_does_not_pay_is_plain_and_those_after_it_are_tried():
    coder, found = ChunkCoder(2), []
    for offset, data in enumerate((smooth(4096), noise(4096), smooth(4096, 1))):
        chunk = cache_pb2.ReadChunk(offset=offset)
        coder.fill(chunk, data)
        assert plain_data(chunk, 4096) == data
        found.append(chunk.HasField("coded"))
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"coding": 0}, "coded.coding", "1 (LZ4)"),
        ({"coding": 2}, "coded.coding", "1 (LZ4)"),
        ({"planes": 0}, "coded.planes", "1, 2, 4"),
        ({"planes": 3}, "coded.planes", "1, 2, 4"),
        ({"planes": 2**32 - 1}, "coded.planes", "1, 2, 4"),
        ({"plain_bytes": 0}, "coded.plain_bytes", "1 to 1048576"),
        ({"plain_bytes": 4095}, "coded.plain_bytes", "a multiple of planes (2)"),
        ({"plain_bytes": CHUNK_BYTES_MAX + 2}, "coded.plain_bytes", "1 to 1048576"),
        ({"plain_bytes": 2**32 - 2}, "coded.plain_bytes", "1 to 1048576"),
        ({"plain_bytes": 8192}, "data", "at most 4096 bytes"),
        ({"plain_bytes": 4094}, "data", "an LZ4 block of 4094 bytes"),
    ],
)
def test_bounds_are_checked_before_anything_is_decoded(monkeypatch, changes, field, expected):
    decoded = []
    decode = chunks.decode_slice
    monkeypatch.setattr(chunks, "decode_slice", lambda *a: decoded.append(len(a[2])) or decode(*a))
    chunk = coded_chunk(smooth(4096))
    for name, value in changes.items():
        setattr(chunk.coded, name, value)
    with pytest.raises(CorruptBlock) as caught:
        plain_data(chunk, 4096)
    assert caught.value.field == field
    assert expected in caught.value.expected
    assert decoded in ([], [4094])


def test_a_small_block_that_decodes_to_much_is_refused():
    """1 MiB of zeros is 4 KiB under LZ4; where the key has less left, or less was promised, it is not let in."""
    bomb = coded_chunk(bytes(CHUNK_BYTES_MAX))
    assert len(bomb.data) < 5000
    for room, promised in ((4096, CHUNK_BYTES_MAX), (CHUNK_BYTES_MAX, 4096)):
        bomb.coded.plain_bytes = promised
        with pytest.raises(CorruptBlock):
            plain_data(bomb, room)


@pytest.mark.parametrize("size", [0, CHUNK_BYTES_MAX + 1])
def test_no_message_carries_more_than_a_mebibyte(size):
    data = bytes(size)
    plain = cache_pb2.WriteChunk(data=data, crc32c=crc32c(data))
    coded = cache_pb2.WriteChunk(data=data, coded=cache_pb2.ChunkCoding(coding=1, plain_bytes=8, planes=1))
    for chunk in (plain, coded):
        with pytest.raises(CorruptBlock) as caught:
            plain_data(chunk, 1 << 30)
        assert (caught.value.field, caught.value.value) == ("data", f"{size} bytes")


def test_no_damage_gives_other_bytes():
    """It is refused, but for other spellings of the same bytes: a match that is found at another distance."""
    data = smooth(2048)
    whole, draw, refused = coded_chunk(data), random.Random(7), []
    size = len(whole.data)
    for position in range(size):
        damaged = bytearray(whole.data)
        damaged[position] ^= draw.randrange(1, 256)
        refused += refusals(whole, bytes(damaged), data)
    assert len(refused) > 0.9 * size
    assert set(refused) == {"data", "crc32c"}
    assert len([f for end in range(size) for f in refusals(whole, whole.data[:end], data)]) == size


def refusals(whole, damaged, data):
    """The field that is named where a damaged chunk is refused."""
    chunk = cache_pb2.ReadChunk.FromString(whole.SerializeToString())
    chunk.data = damaged
    try:
        assert plain_data(chunk, len(data)) == data
    except CorruptBlock as error:
        return [error.field]
    return []


@given(
    data=st.binary(max_size=200),
    planes=st.integers(0, 5),
    size=st.integers(0, 4096),
    coding=st.integers(0, 2),
    crc=st.integers(0, 2**32 - 1),
)
def test_any_other_bytes_are_refused(data, planes, size, coding, crc):
    chunk = cache_pb2.WriteChunk(data=data, crc32c=crc)
    chunk.coded.CopyFrom(cache_pb2.ChunkCoding(coding=coding, plain_bytes=size, planes=planes))
    try:
        plain = plain_data(chunk, 4096)
    except CorruptBlock:
        return
    assert crc32c(plain) == crc
    assert len(plain) == size
