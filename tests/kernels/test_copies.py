"""Every form of copy against numpy and the CRC-32C package, on every level, and the choice between them."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c

from kvstore.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the C++ kernels are not built here")

POISON = 0xEE
SUMMED = ("plain", "lanes", "streamed near lanes", "streamed page lanes", "bounced")
SIZES = (0, 1, 31, 63, 64, 65, 3071, 3072, 3135, 12_288, 12_289, 12_351, 40_961, 262_144, 262_207)
COPIED = ("plain", "streamed", "streamed near lanes", "streamed page lanes", "bounced")
LEVELS = native.native_status().levels


def _forms(level: str, *, summed: bool) -> tuple[str, ...]:
    return ("plain",) if level == "portable" else SUMMED if summed else COPIED


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize(
    "size", [0, 1, 31, 63, 64, 65, 3071, 3072, 3135, 12288, 12289, 12351, 40_961, 262_144, 262_207]
)
def test_every_form_copies_and_sums(level: str, summed: bool, size: int) -> None:
    rng = np.random.default_rng(size)
    data = rng.integers(0, 256, size + 128, dtype=np.uint8)
    for form in _forms(level, summed=summed):
        for to_offset, from_offset in ((0, 0), (1, 0), (32, 7), (63, 63)):
            source = data[from_offset : from_offset + size]
            whole = np.full(size + 256, POISON, np.uint8)
            begin = -whole.ctypes.data % 64 + to_offset
            crc = native.copy_by(form, whole[begin : begin + size], source, summed=summed, crc=77, level=level)
            assert crc == (crc32c(source.tobytes(), 77) if summed else 0), form
            assert (whole[begin : begin + size] == source).all(), form
            assert (whole[:begin] == POISON).all(), form
            assert (whole[begin + size :] == POISON).all(), form


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_taken_is_near_the_best_that_was_measured(level: str) -> None:
    variants = native.copy_variant(level)
    assert tuple(variants) == native.COPY_KINDS
    for kind, variant in variants.items():
        assert variant.speeds[variant.form] >= 0.8 * max(variant.speeds.values()), kind
        wanted = _forms(level, summed="checksum" in kind)
        small = tuple(form for form in wanted if form in ("plain", "lanes"))
        assert tuple(variant.speeds) == (wanted if kind.startswith("large") else small)


def test_the_choice_is_made_once() -> None:
    assert native.copy_variant() == native.copy_variant() == native.copy_variant(LEVELS[0])


def test_unknown_forms_and_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="no such copy"):
        native.copy_by("sideways", bytearray(4), b"four", summed=True)
    with pytest.raises(ValueError, match="no such copy"):
        native.copy_by("streamed", bytearray(4), b"four", summed=True)
    with pytest.raises(ValueError, match="smaller"):
        native.copy_by("plain", bytearray(3), b"four", summed=False)
    with pytest.raises(ValueError, match="level"):
        native.copy_variant("mmx")
