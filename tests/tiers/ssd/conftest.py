"""Builds tiers on real and on faulty disks, and reads blocks back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.tiers.base import BlockRead, BlockWrite, DiskHandle, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier

MIB = 1 << 20


class Bench:
    """One directory, opened again and again, and what its blocks should be."""

    def __init__(self, directory: str, **settings) -> None:
        self.directory = directory
        self.settings = {"capacity_bytes": 64 * MIB, "compact_interval_s": None, "commit_interval_s": None} | settings
        self.maker = BlockMaker()
        self.tier: SsdTier | None = None
        self.found = []

    def open(self, port=None, **settings) -> SsdTier:
        self.close()
        self.tier = SsdTier(self.directory, SsdConfig(**(self.settings | settings)), port=port)
        self.found = list(self.tier.recover())
        return self.tier

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        self.tier = None

    def write(self, seeds: Sequence[int], *, durable: bool = True, parent=ROOT_PARENT) -> list[DiskHandle]:
        self.tier.put_namespace(self.maker.spec, NamespacePolicy(), "bench")
        return self.tier.write(self.maker.namespace_id, self.maker.chain(list(seeds), parent), durable=durable)

    def read(self, handles: Sequence[DiskHandle], blocks: Sequence[BlockWrite]) -> list[ReadStatus | bytes]:
        """The bytes of every block that is OK, the status of every other."""
        into = [memoryview(bytearray(len(block.stored))) for block in blocks]
        reads = [BlockRead(h, block.key, data) for h, block, data in zip(handles, blocks, into, strict=True)]
        status = self.tier.read(reads)
        return [bytes(data) if s is ReadStatus.OK else s for s, data in zip(status, into, strict=True)]


@pytest.fixture
def bench(tmp_path):
    made = Bench(str(tmp_path / "ssd"))
    yield made
    made.close()


@pytest.fixture
def make_bench(tmp_path):
    """Benches with settings of their own."""
    made = []

    def make(name: str = "ssd", **settings) -> Bench:
        made.append(Bench(str(tmp_path / name), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
