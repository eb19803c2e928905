"""The directory's LOCK: only a plain file of ours is ever written, and whoever holds it is not overlooked."""

from __future__ import annotations

import errno
import os

import pytest

from kvstore.core import lockfile
from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd.port import LinuxDisk


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_the_lock_harms_nothing(tmp_path, link):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "ssd").mkdir()
    link(victim, tmp_path / "ssd" / "LOCK")
    port = LinuxDisk(str(tmp_path / "ssd"))
    fd = port.lock("LOCK")
    assert victim.read_text() == "precious"
    assert (tmp_path / "ssd" / "LOCK").read_text() == str(os.getpid())
    with pytest.raises(TierUnavailable, match=f"held by pid {os.getpid()}"):
        LinuxDisk(str(tmp_path / "ssd")).lock("LOCK")
    port.close(fd)


def test_a_lock_that_got_another_name_is_still_held(tmp_path):
    port = LinuxDisk(str(tmp_path))
    fd = port.lock("LOCK")
    # As a backup by hard links does.
    os.link(tmp_path / "LOCK", tmp_path / "backup")
    with pytest.raises(TierUnavailable, match=f"held by pid {os.getpid()}"):
        LinuxDisk(str(tmp_path)).lock("LOCK")
    port.close(fd)
    again = LinuxDisk(str(tmp_path)).lock("LOCK")
    assert (tmp_path / "backup").stat().st_ino != (tmp_path / "LOCK").stat().st_ino
    os.close(again)


def test_a_lock_that_may_not_be_opened_is_left_alone(tmp_path, monkeypatch):
    """It may be another daemon's of another user, which has it locked."""
    (tmp_path / "LOCK").write_text("4711")
    real = os.open

    def refused(path, *arguments, **named):
        if str(path).endswith("LOCK"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(lockfile.os, "open", refused)
    with pytest.raises(TierUnavailable, match="LOCK: Permission denied"):
        LinuxDisk(str(tmp_path)).lock("LOCK")
    assert (tmp_path / "LOCK").read_text() == "4711"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_replaced_or_refused(tmp_path, make):
    make(tmp_path / "LOCK")
    if (tmp_path / "LOCK").is_dir():
        with pytest.raises(TierUnavailable, match="LOCK"):
            LinuxDisk(str(tmp_path)).lock("LOCK")
    else:
        os.close(LinuxDisk(str(tmp_path)).lock("LOCK"))
        assert (tmp_path / "LOCK").is_file()
