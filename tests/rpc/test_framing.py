"""Frames survive any cut of the stream, and what is no frame is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.wire.framing import FRAME_BYTES_MAX, Frame, FrameDecoder, FrameKind, pack_frame

frames = st.builds(
    Frame,
    call_id=st.integers(0, 2**64 - 1),
    kind=st.sampled_from([int(kind) for kind in FrameKind]),
    code=st.integers(0, 255),
    name=st.text(st.characters(max_codepoint=127), max_size=40),
    payload=st.binary(max_size=300),
)


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 2000), max_size=8))
def test_any_cut_of_the_stream_gives_the_same_frames(sent, cuts):
    stream = b"".join(
        pack_frame(f.call_id, FrameKind(f.kind), f.payload, name=f.name.encode(), code=f.code) for f in sent
    )
    decoder, received, begin = FrameDecoder(), [], 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        received += decoder.feed(stream[begin:cut])
        begin = cut
    assert received == sent


def test_layout_on_the_wire():
    frame = pack_frame(7, FrameKind.REQUEST, b"xyz", name=b"a/B")
    assert frame == struct.pack("<IQBBH", 18, 7, 0, 0, 3) + b"a/B" + b"xyz"


def test_a_frame_may_not_be_too_long():
    fits = pack_frame(1, FrameKind.REPLY, bytes(FRAME_BYTES_MAX - 12))
    assert FrameDecoder().feed(fits)[0].payload == bytes(FRAME_BYTES_MAX - 12)
    with pytest.raises(InvalidArgument) as caught:
        pack_frame(1, FrameKind.REPLY, bytes(FRAME_BYTES_MAX - 11))
    assert caught.value.field == "message"


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (struct.pack("<IQBBH", FRAME_BYTES_MAX + 1, 1, 0, 0, 0), "frame.length"),
        (struct.pack("<IQBBH", 11, 1, 0, 0, 0), "frame.length"),
        (struct.pack("<IQBBH", 14, 1, 0, 0, 3), "frame.length"),
        (struct.pack("<IQBBH", 12, 1, 6, 0, 0), "frame.kind"),
        (struct.pack("<IQBBH", 13, 1, 0, 0, 1) + b"\xff", "frame.name"),
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_read(header, field):
    with pytest.raises(InvalidArgument) as caught:
        FrameDecoder().feed(header)
    assert caught.value.field == field
