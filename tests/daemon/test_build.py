"""What the configuration says of the SSD tier reaches it."""

from __future__ import annotations

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.errors import TierUnavailable
from kvstore.daemon import build
from kvstore.daemon.config import Config
from kvstore.tiers.ssd import SsdConfig, SsdTier

SSD = {"device": 0, "host": "4 MiB", "ssd": "32 MiB", "ssd_free_floor": 0}


def test_the_settings_of_the_ssd_tier_are_the_configured_ones(tmp_path, monkeypatch):
    seen = []

    def make(directory, settings, clock):
        seen.append(settings)
        return SsdTier(directory, settings, clock)

    monkeypatch.setattr(build, "SsdTier", make)
    config = Config(
        ssd_dir=tmp_path,
        ssd_recovery="strict",
        ssd_fragmentation=0.5,
        ssd_io_deadline_s=2.5,
        ssd_segment="1 MiB",
        **SSD,
    )
    build.build_tiers(config, ManualClock()).close()
    assert seen == [
        SsdConfig(
            capacity_bytes=32 << 20, segment_bytes=1 << 20, io_deadline_s=2.5, fragmentation=0.5, recovery="strict"
        )
    ]


def test_strict_recovery_refuses_damage_that_normal_recovery_sets_aside(tmp_path):
    build.build_tiers(Config(ssd_dir=tmp_path, **SSD), ManualClock()).close()
    (tmp_path / "namespaces").write_bytes(b"no catalog")
    tiers = build.build_tiers(Config(ssd_dir=tmp_path, ssd_recovery="strict", **SSD), ManualClock())
    with pytest.raises(TierUnavailable, match="namespaces"):
        list(tiers.disk.recover())
    tiers.close()
    tiers = build.build_tiers(Config(ssd_dir=tmp_path, **SSD), ManualClock())
    assert list(tiers.disk.recover()) == []
    tiers.close()
