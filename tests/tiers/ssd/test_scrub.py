"""What the records of a directory at rest name."""

from __future__ import annotations

import pytest

from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd import LinuxDisk
from kvstore.tiers.ssd.scrub import check_directory, named_blocks


def killed(bench, tmp_path):
    """The directory as a kill leaves it: the records that were synced, and no checkpoint of the end."""
    copy = tmp_path / "killed"
    copy.mkdir()
    for name in (tmp_path / "ssd").iterdir():
        if name.is_file():
            (copy / name.name).write_bytes(name.read_bytes())
    return LinuxDisk(str(copy))


def test_durable_blocks_are_named_and_dropped_ones_are_not(bench, tmp_path):
    bench.open()
    handles = bench.write([1, 2, 3, 4])
    assert named_blocks(killed(bench, tmp_path)) == (frozenset(bench.maker.key(seed) for seed in (1, 2, 3, 4)), ())
    bench.tier.drop(handles[2:3])
    bench.tier.flush()
    bench.close()
    assert named_blocks(LinuxDisk(str(tmp_path / "ssd")))[0] == {bench.maker.key(seed) for seed in (1, 2, 4)}


def test_a_directory_that_is_held_or_empty_is_refused(bench, tmp_path):
    bench.open()
    bench.write([1])
    with pytest.raises(TierUnavailable, match="held"):
        named_blocks(LinuxDisk(str(tmp_path / "ssd")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TierUnavailable, match="holds no SSD tier"):
        named_blocks(LinuxDisk(str(tmp_path / "empty")))


@pytest.mark.parametrize(("content", "whole"), [(b"", True), (bytes(512), True), (bytes(1024), False)])
def test_the_torn_head_of_a_journal_without_frames_is_no_damage(bench, tmp_path, content, whole):
    bench.open()
    bench.write([1])
    port = killed(bench, tmp_path)
    (tmp_path / "killed" / "journal-00000009").write_bytes(content)
    assert check_directory(port).whole == whole
    assert (not named_blocks(port)[1]) == whole
    assert named_blocks(port)[0] == {bench.maker.key(1)}
