"""After a kill: reopen the directory, and compare every block with what the workers told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from kvstore.testing.blocks import BlockMaker
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.tools.crashtest.worker import is_right

BATCH_BLOCKS: Final = 64


@dataclass(frozen=True, slots=True)
class Expected:
    """What must hold: seeds that must be there, may be there, and were ever written."""

    must: frozenset[int]
    may: frozenset[int]
    next_seed: int


@dataclass(slots=True)
class Verdict:
    """What was found. Every list but ``found`` must stay empty."""

    found: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    phantoms: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cut_bytes: int = 0


def du(directory: str) -> int:
    """Bytes that ``du`` counts."""
    total = os.lstat(directory).st_blocks * 512
    for folder, folders, files in os.walk(directory):
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in [*folders, *files])
    return total


def judge(directory: str, config: SsdConfig, expected: Expected, *, clean: bool) -> Verdict:
    """Recover and compare; with ``clean`` the tier is closed properly afterwards, else left as a kill leaves it."""
    maker = BlockMaker()
    verdict = Verdict()
    seed_of = {maker.key(seed): seed for seed in range(expected.next_seed)}
    tier = SsdTier(directory, config)
    blocks = list(tier.recover())
    verdict.seconds, verdict.cut_bytes = tier.report.seconds, tier.report.cut_bytes
    if tier.report.quarantined:
        verdict.faults.append(f"recovery quarantined {tier.report.quarantined} blocks")
    for begin in range(0, len(blocks), BATCH_BLOCKS):
        some = blocks[begin : begin + BATCH_BLOCKS]
        into = [memoryview(bytearray(maker.layout.stored_bytes)) for _ in some]
        reads = [BlockRead(one.handle, one.key, data) for one, data in zip(some, into, strict=True)]
        for one, status, data in zip(some, tier.read(reads), into, strict=True):
            seed = seed_of.get(one.key, -1)
            if seed not in expected.must and seed not in expected.may:
                verdict.phantoms.append(seed)
            if status is not ReadStatus.OK or not is_right(maker, seed, data):
                verdict.corrupt.append(seed)
            verdict.found.append(seed)
    verdict.lost = sorted(expected.must - set(verdict.found))
    counted, real = tier.usage().ledger_bytes, du(directory)
    if counted != real:
        verdict.faults.append(f"the ledger says {counted} bytes, du says {real}")
    if real > config.capacity_bytes:
        verdict.faults.append(f"du says {real} bytes, over the cap of {config.capacity_bytes}")
    verdict.faults += [f"{name} was left" for name in os.listdir(directory) if name.endswith(".tmp")]
    if clean:
        tier.close()
    return verdict
