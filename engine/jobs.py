"""Jobs of the cache that the engine waits for without blocking: prefixes on their way, and blocks being moved."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvstore.cache import FetchResult
from kvstore.core.types import BlockKey, JobId, Outcome
from kvstore.engine.blocks import Block
from kvstore.engine.link import CacheLink
from kvstore.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixJob:
    """A prefix being promoted; ``residency`` is from the match before. ``sequence`` may have gone meanwhile."""

    keys: tuple[BlockKey, ...]
    residency: tuple[int, ...]
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class MoveJob:
    """Blocks being copied to HOST."""

    blocks: tuple[Block, ...]


class Jobs:
    """The open jobs of one link."""

    def __init__(self, link: CacheLink) -> None:
        self._link = link
        self._open: dict[JobId, PrefixJob | MoveJob] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, job_id: JobId, job: PrefixJob | MoveJob) -> None:
        """Watch a job."""
        self._open[job_id] = job

    def fetching(self, key: BlockKey) -> JobId | None:
        """The job that brings this key as part of a prefix, if any."""
        for job_id, job in self._open.items():
            if isinstance(job, PrefixJob) and key in job.keys:
                return job_id
        return None

    def done(self, wait_ms: int = 0) -> list[tuple[JobId, PrefixJob | MoveJob, FetchResult]]:
        """Take out the jobs that have ended, with their results; waits up to ``wait_ms`` for the oldest.

        Raises LinkLost.
        """
        ended = []
        for job_id, job in list(self._open.items()):
            result = self._ask(job_id, wait_ms)
            wait_ms = 0
            if Outcome.PENDING not in result.outcomes:
                del self._open[job_id]
                ended.append((job_id, job, result))
        return ended

    def is_open(self, job_id: JobId) -> bool:
        """True until ``done`` took the job out."""
        return job_id in self._open

    def clear(self) -> None:
        """Forget all: the link was lost."""
        self._open.clear()

    def _ask(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        return self._link.call(lambda cache: cache.wait_job(job_id, timeout_ms))


def leading_hits(outcomes: Items[Outcome]) -> int:
    """Number of HITs before the first other outcome."""
    return next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.HIT), len(outcomes))
