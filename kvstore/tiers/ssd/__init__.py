"""The SSD tier: blocks that survive the daemon, in append-only segments behind a disk port.

This room knows files, syncs, checksums and the cap; it must not know leases, LRU order or sessions, and does
no I/O but through ``port.py``. Read ``format.py`` first (what lies where, and what each sync orders), then
``tier.py``; docs/format.md is the same contract in prose.
"""

from kvstore.tiers.ssd.config import SsdConfig
from kvstore.tiers.ssd.port import DiskPort, FileStat, LinuxDisk
from kvstore.tiers.ssd.tier import SsdTier

__all__ = ["DiskPort", "FileStat", "LinuxDisk", "SsdConfig", "SsdTier"]
