"""Random operations against a dictionary, with restarts, kills and lost power in between."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.errors import TierFull
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT, BlockKey
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier
from tests.client.harness import until

MAKER = BlockMaker()
CONFIG = SsdConfig(
    capacity_bytes=1 << 20, read_threads=1, write_threads=1, commit_interval_s=None, compact_interval_s=None,
    io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072, journal_bytes=4096,
)  # fmt: skip


class TierAgainstDictionary(RuleBasedStateMachine):
    """``live`` is what must be there, ``maybe`` what a crash may have kept or not."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.next_seed = 0
        self.live: dict[BlockKey, tuple[DiskHandle, bytes]] = {}
        self.synced: dict[BlockKey, bytes] = {}
        self.written: dict[BlockKey, bytes] = {}
        self.open()

    def open(self) -> list[BlockKey]:
        self.tier = SsdTier("memory", CONFIG, port=self.disk)
        found = {one.key: one.handle for one in self.tier.recover()}
        self.tier.put_namespace(MAKER.spec, NamespacePolicy(), "model")
        self.live = {key: (handle, self.written[key]) for key, handle in found.items()}
        self.synced = {key: self.written[key] for key in found}
        return list(found)

    @rule(count=st.integers(1, 5), durable=st.booleans())
    def write(self, count: int, durable: bool) -> None:
        seeds = list(range(self.next_seed, self.next_seed + count))
        self.next_seed += count
        blocks = MAKER.chain(seeds, ROOT_PARENT)
        try:
            handles = self.tier.write(MAKER.namespace_id, blocks, durable=durable)
        except TierFull:
            self.tier.reclaim(1 << 16)
            return
        for handle, block in zip(handles, blocks, strict=True):
            self.written[block.key] = bytes(block.stored)
            self.live[block.key] = (handle, bytes(block.stored))
            if durable:
                self.synced[block.key] = bytes(block.stored)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 8))
    def drop(self, data: st.DataObject, count: int) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=count, unique=True))
        self.tier.drop([self.live.pop(key)[0] for key in keys])
        self.tier.flush()
        self.synced = {key: stored for key, (_, stored) in self.live.items()}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read_layers(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        begin = data.draw(st.integers(0, MAKER.layout.layers - 1))
        end = data.draw(st.integers(begin + 1, MAKER.layout.layers))
        stride, header = MAKER.layout.raw_slice_stride, MAKER.layout.header_bytes
        into = memoryview(bytearray((end - begin) * stride))
        handle, stored = self.live[key]
        assert self.tier.read([BlockRead(handle, key, into, (begin, end))]) == [ReadStatus.OK]
        assert bytes(into) == stored[header + begin * stride : header + end * stride]

    @rule(threshold=st.sampled_from([0.05, 0.3, 0.8]))
    def compact(self, threshold: float) -> None:
        self.tier.compact(threshold)

    @rule(nbytes=st.sampled_from([1, 1 << 16, 1 << 18]))
    def reclaim(self, nbytes: int) -> None:
        self.tier.reclaim(nbytes)

    @rule()
    def restart(self) -> None:
        before = set(self.live)
        self.tier.close()
        assert set(self.open()) == before

    @rule(mode=st.sampled_from(list(Crash)), seed=st.integers(0, 1000))
    def crash(self, mode: Crash, seed: int) -> None:
        must, may = set(self.synced), set(self.live)
        after = self.disk.crash(mode, seed)
        self.tier.close()
        self.disk = after
        found = set(self.open())
        assert must <= found <= may

    @invariant()
    def everything_reads_back(self) -> None:
        keys = sorted(self.live)
        into = [memoryview(bytearray(len(self.live[key][1]))) for key in keys]
        reads = [BlockRead(self.live[key][0], key, data) for key, data in zip(keys, into, strict=True)]
        assert self.tier.read(reads) == [ReadStatus.OK] * len(keys)
        assert all(bytes(data) == self.live[key][1] for key, data in zip(keys, into, strict=True))

    @invariant()
    def the_ledger_is_du_and_keeps_the_cap(self) -> None:
        assert self.disk.used_bytes() <= CONFIG.capacity_bytes
        # The committer tells that a commit is done before it writes a checkpoint, whose files come to the ledger then.
        until(lambda: self.tier.usage().ledger_bytes == self.disk.used_bytes())

    def teardown(self) -> None:
        self.tier.close()


TestTierAgainstDictionary = TierAgainstDictionary.TestCase
TestTierAgainstDictionary.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
