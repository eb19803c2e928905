"""Blocks that were used come back as more recent than those that were not, at no I/O of its own."""

from __future__ import annotations

import random

import pytest

from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import ROOT_PARENT
from kvstore.testing.blocks import BlockMaker
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.tiers.base import DiskHandle
from kvstore.tiers.ssd import SsdConfig, SsdTier

MAKER = BlockMaker()
CONFIG = SsdConfig(
    capacity_bytes=4 << 20, read_threads=2, write_threads=1, commit_interval_s=None, compact_interval_s=None,
    io_bytes=65536, read_bytes_in_flight=131072, write_bytes_in_flight=131072, io_deadline_s=30.0,
    journal_bytes=4096,
)  # fmt: skip


class Case:
    """A tier on a disk in memory, and chains in it that are told apart by the seed of their first block."""

    def __init__(self) -> None:
        self.disk = FaultyDisk()
        self.chain_of = {}
        self.open()

    def open(self) -> None:
        self.tier = SsdTier("memory", CONFIG, port=self.disk)
        self.handles: dict[int, list[DiskHandle]] = {}
        for one in self.tier.recover():
            self.handles.setdefault(self.chain_of[one.key], []).append(one.handle)

    def write(self, seed: int, blocks: int = 3) -> None:
        self.tier.put_namespace(MAKER.spec, NamespacePolicy(), "recency")
        chain = MAKER.chain(list(range(seed * 100, seed * 100 + blocks)), ROOT_PARENT)
        self.chain_of |= {block.key: seed for block in chain}
        self.handles[seed] = list(self.tier.write(MAKER.namespace_id, chain, durable=True))

    def reopen(self) -> list[int]:
        """Seeds of the chains in the order of recovery."""
        self.tier.close()
        self.open()
        return list(self.handles)

    def crash(self) -> list[int]:
        after = self.disk.crash(Crash.LOST)
        self.tier.close()
        self.disk = after
        self.open()
        return list(self.handles)


@pytest.fixture
def case():
    made = Case()
    yield made
    made.tier.close()


def test_what_was_used_comes_last_in_its_order(case):
    for seed in range(5):
        case.write(seed)
    operations = case.disk.operations
    case.tier.touch([*case.handles[3], *case.handles[0], case.handles[1][2]])
    assert case.disk.operations == operations
    assert case.reopen() == [2, 4, 3, 0, 1]
    case.write(5)
    assert case.reopen() == [2, 4, 3, 0, 1, 5]


def test_a_clean_end_keeps_it_without_a_write(case):
    for seed in range(3):
        case.write(seed)
    assert case.reopen() == [0, 1, 2]
    case.tier.touch(case.handles[0])
    assert case.reopen() == [1, 2, 0]


def test_a_clean_end_keeps_what_came_after_a_checkpoint_and_nothing_else(case):
    seed, log = 0, case.disk.log
    while not any("rename checkpoint" in entry for entry in log):
        case.write(seed)
        case.tier.flush()
        seed += 1
    case.tier.touch(case.handles[0])
    assert case.reopen() == [*range(1, seed), 0]


def test_a_crash_forgets_what_came_after_the_last_checkpoint(case):
    for seed in range(4):
        case.write(seed)
    case.tier.touch(case.handles[1])
    case.reopen()
    case.tier.touch(case.handles[0])
    case.write(4)
    assert case.crash() == [0, 2, 3, 1, 4]


def test_blocks_that_are_not_there_are_left_out(case):
    for seed in range(3):
        case.write(seed)
    case.tier.drop(case.handles[0])
    case.tier.touch([DiskHandle(10_000), *case.handles[0], *case.handles[1], DiskHandle(-1)])
    case.tier.touch([])
    assert case.reopen() == [2, 1]


@pytest.mark.parametrize("seed", range(12))
def test_against_a_list(seed):
    """Writes, uses, drops, rewriting and restarts: recovery follows a list from which what is used moves to the end."""
    chance, case, model = random.Random(seed), Case(), []
    for number in range(60):
        what = chance.randrange(6)
        if what < 2 or len(model) < 2:
            case.write(number)
            model.append(number)
        elif what == 2:
            for one in chance.sample(model, chance.randrange(1, len(model))):
                case.tier.touch([chance.choice(case.handles[one])])
                model.append(model.pop(model.index(one)))
        elif what == 3:
            some = chance.sample(model, chance.randrange(1, len(model)))
            case.tier.touch([chance.choice(case.handles[one]) for one in some])
            model = [one for one in model if one not in some] + some
        elif what == 4:
            gone = model.pop(chance.randrange(len(model)))
            case.tier.drop(case.handles.pop(gone))
            case.tier.compact(0.05)
        else:
            assert case.reopen() == model
    assert case.reopen() == model
    case.tier.close()
