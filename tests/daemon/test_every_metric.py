"""Each metric of the table moves when what it tells of happens: a cause for every one of them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvstore.client import PutBlocks
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import parents_of
from kvstore.core.namespace import NamespacePolicy
from kvstore.core.types import Durability, Outcome, Target, Tier, WritePolicy
from kvstore.daemon.metrics import METRICS
from kvstore.store.moves.persist import Persister
from kvstore.testing.faulty_disk import Crash, FaultyDisk
from kvstore.v1 import cache_pb2
from tests.client.harness import blocks_of, chain, payload, small_spec, until
from tests.daemon.ground import MIB, Ground, ground_over, scrape

BLOCKS_IN_HOST = 48
"""More than 1 MiB of HOST holds, of the small blocks of these tests."""


BACK = NamespacePolicy(write=WritePolicy.BACK)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground_over(FaultyDisk(capacity_bytes=64 * MIB), tmp_path_factory.mktemp("g")) as made:
        yield made


def is_there_from_the_start(ground: Ground) -> None:
    ground.begin(from_nothing=True)
    found = ground.look()
    assert found["kvstore_tier_capacity_bytes", "host"] == MIB
    assert found["kvstore_tier_high_watermark_ratio", "host"] == 0.95
    assert found["kvstore_tier_up", "ssd"] == 1
    ground.moved &= {"kvstore_build_info", "kvstore_tier_capacity_bytes", "kvstore_tier_high_watermark_ratio"}


def time_passes(ground: Ground) -> None:
    ground.clock.advance(1)


def blocks_are_put(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 4)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        client.reserve(opened.namespace_id, Tier.HOST, keys=keys)
        found = ground.look()
        assert found["kvstore_put_blocks_total", "new"] == 4
        assert found["kvstore_put_blocks_total", "known"] == 4
        assert found["kvstore_transfer_blocks_total", "buffer", "host"] == 4
        assert found["kvstore_tier_blocks", "host"] == 4


def blocks_are_refused(ground: Ground) -> None:
    with ground.client() as client:
        opened, _ = ground.put(client, 2)
        ground.admin(client, "Drain", timeout_ms=1)
        client.reserve(opened.namespace_id, Tier.HOST, keys=chain(opened.namespace_id, 5)[0])
        found = ground.look()
        ground.admin(client, "Drain", resume=True)
        assert (found["kvstore_draining",], found["kvstore_put_refused_total", "draining"]) == (1, 3)


def blocks_are_read(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 3)
        asked, _ = chain(opened.namespace_id, 4)
        assert client.match(opened.namespace_id, asked).matched == 3
        lease = client.grant_lease("reader", 30_000)
        client.hold(lease, opened.namespace_id, keys)
        client.fetch(opened.namespace_id, asked, Target.IN_PLACE, lease_id=lease)
        client.fetch(opened.namespace_id, keys, Target.BUFFER, lease_id=lease, wait_ms=9_000)
        found = ground.look()
        assert found["kvstore_match_missed_total", "never_stored"] == 1
        assert found["kvstore_fetch_missed_total", "never_stored"] == 1
        assert found["kvstore_copies", "pinned"] == 3
        assert found["kvstore_transfer_blocks_total", "host", "buffer"] == 3


def leases_and_sessions_run_out(ground: Ground) -> None:
    with ground.client() as client:
        client.grant_lease("short", 1_000)
        client.connection()[0].call("kvstore.v1.Sessions/OpenRemote", b"", 9)
        ground.clock.advance(600)
        ground.until_moved("kvstore_leases_expired_total", "kvstore_sessions_expired_total")


def host_runs_over(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 6, BACK)
        for _ in range(4):
            ground.put(client, BLOCKS_IN_HOST // 2, BACK)
        ground.until_moved("kvstore_tier_demoted_total", "kvstore_ssd_written_blocks_total")
        lease = client.grant_lease("again", 30_000)
        client.fetch(opened.namespace_id, keys, Target.HOST, lease_id=lease, wait_ms=9_000)
        assert ground.look()["kvstore_transfer_blocks_total", "ssd", "host"] > 0
        client.release(lease)
        client.remove(opened.namespace_id, keys)
        for _ in range(4):
            ground.put(client, BLOCKS_IN_HOST // 2)
        client.flush()


def device_is_used(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 2)
        reserved = client.reserve(opened.namespace_id, Tier.DEVICE, count=2)
        found = ground.look()
        assert found["kvstore_reservations",] >= 2
        assert found["kvstore_tier_reserved_bytes", "device"] == 2 * opened.layout.device_bytes
        client.abort(reserved.reservation_ids)
        lease = client.grant_lease("device", 30_000)
        client.fetch(opened.namespace_id, keys, Target.DEVICE, lease_id=lease, wait_ms=9_000)
        assert ground.look()["kvstore_transfer_blocks_total", "host", "device"] == 2


def codecs_save(ground: Ground) -> None:
    with ground.client(remote=True) as client:
        opened = client.open_namespace(small_spec(salt=b"int8", codec="int8", head_dim=128, block_tokens=64))
        keys, _ = chain(opened.namespace_id, 1)
        raw = [bytes(opened.layout.layers * opened.layout.raw_slice_bytes)]
        client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), raw))
        opened = client.open_namespace(small_spec(salt=b"zeros"), policy=NamespacePolicy(lossless="lz4"))
        keys, _ = chain(opened.namespace_id, 2)
        zeros = [bytes(opened.layout.layers * opened.layout.raw_slice_bytes)] * 2
        client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), zeros, durability=Durability.DURABLE))
        client.get(opened.namespace_id, keys)
        found = ground.look()
        assert found["kvstore_call_seconds_count", "Cache/Read"] == 1
        assert found["kvstore_call_seconds_count", "Cache/Write"] == 2


def calls_fail(ground: Ground) -> None:
    with ground.client() as client, pytest.raises(InvalidArgument):
        client.connection()[0].call("kvstore.v1.Admin/ListBlocks", b"\x18\xff\xff\xff\x0f", 9)


def the_disk_stands_still(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 2)
        others, more = ground.put(client, 2)
        client.flush()
        for known, some in ((opened, keys), (others, more)):
            ground.admin(client, "Evict", namespace_id=known.namespace_id, keys=b"".join(some), tier=int(Tier.HOST))
        ground.disk.stall("pread")
        lease = client.grant_lease("waits", 30_000)
        jobs = [client.fetch(opened.namespace_id, keys, Target.HOST, lease_id=lease)]
        until(lambda: ground.store.status().counters["loads_queued"] == 0)
        jobs.append(client.fetch(others.namespace_id, more, Target.HOST, lease_id=lease))
        assert all(job.job_id for job in jobs)
        refused = client.fetch(opened.namespace_id, keys[:1], Target.DEVICE, lease_id=lease)
        assert refused.outcomes == (Outcome.BUSY,)
        wait = cache_pb2.WaitJobRequest(job_id=jobs[0].job_id, timeout_ms=9_000).SerializeToString()
        waiting = client.connection()[0].send("kvstore.v1.Cache/WaitJob", wait, 9.0)
        ground.until_moved("kvstore_queue", "kvstore_jobs", "kvstore_calls_in_progress")
        ground.disk.release()
        client.connection()[0].wait(waiting, "kvstore.v1.Cache/WaitJob", 9.0)
        assert client.wait_job(jobs[1].job_id, 9_000).outcomes


def the_disk_fails(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 2)
        client.flush()
        ground.admin(client, "Evict", namespace_id=opened.namespace_id, keys=b"".join(keys), tier=int(Tier.HOST))
        ground.disk.fail = lambda _number, kind, _name: errno.EIO if kind in ("pread", "pwrite") else 0
        lease = client.grant_lease("fails", 30_000)
        client.fetch(opened.namespace_id, keys, Target.HOST, lease_id=lease, wait_ms=9_000)
        ground.put(client, 2)
        ground.until_moved("kvstore_tier_up", "kvstore_disk_degradations_total")
        ground.disk.fail = lambda *_: 0
        until(lambda: ground.clock.advance(2) or scrape(ground.port)["kvstore_tier_up", "ssd"] == 1)


def the_disk_is_full(ground: Ground) -> None:
    with ground.client() as client:
        ground.disk.fail = lambda _number, kind, _name: errno.ENOSPC if kind == "fallocate" else 0
        for _ in range(4):
            ground.put(client, BLOCKS_IN_HOST)
        ground.until_moved("kvstore_disk_refused_total")
        ground.disk.fail = lambda *_: 0


def blocks_are_damaged(ground: Ground) -> None:
    with ground.client() as client:
        opened, keys = ground.put(client, 2)
        client.flush()
        ground.admin(client, "Evict", namespace_id=opened.namespace_id, keys=b"".join(keys), tier=int(Tier.HOST))
        written = payload(opened.layout, keys[1])[:256]
        (name, data), *_ = [(name, data) for name, data in ground.disk.image().items() if written in data]
        ground.disk.overwrite(name, data.replace(written, bytes(256)))
        ground.admin(client, "Verify", namespace_id=opened.namespace_id)


def space_is_given_back(ground: Ground) -> None:
    with ground.client() as client:
        for _ in range(3):
            opened, keys = ground.put(client, 40)
            client.flush()
            client.remove(opened.namespace_id, keys[8:])
        ground.admin(client, "Compact", fragmentation=0.01)


def a_mover_fails(ground: Ground) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    with pytest.MonkeyPatch.context() as patch, ground.client() as client:
        patch.setattr(Persister, "to_ssd", broken)
        ground.put(client, 1)
        ground.until_moved("kvstore_mover_restarts_total")


def work(seconds: float) -> None:
    """Take so much CPU time of the calling thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def everybody_waits(ground: Ground) -> None:
    pause, loop = threading.Event(), ground.daemon._loop
    assert loop is not None
    now = scrape(ground.port)
    loop.call_soon_threadsafe(pause.wait, now["kvstore_loop_turn_longest_us",] / 1e6 + 0.06)
    loop.call_soon_threadsafe(work, now["kvstore_loop_work_longest_us",] / 1e6 + 0.06)
    with ground.store._state.locked():
        pause.wait(now["kvstore_locked_section_longest_us",] / 1e6 + 0.06)
    with ground.store._state.locked():
        work(now["kvstore_locked_work_longest_us",] / 1e6 + 0.06)


def a_daemon_starts_again(ground: Ground) -> None:
    with ground.client() as client:
        for _ in range(3):
            ground.put(client, BLOCKS_IN_HOST)
        client.flush()
    disk = ground.disk.crash(Crash.KILL)
    image = disk.image()
    for name, data in image.items():
        if name.startswith("journal"):
            disk.overwrite(name, data + bytes(range(1, 200)))
    disk.remove(min(name for name in image if name.startswith("segment")))
    folder = ground.path.parent / "again"
    folder.mkdir()
    with ground_over(disk, folder) as again:
        again.begin(from_nothing=True)
        again.look()
        ground.moved |= {name for name in again.moved if name.startswith("kvstore_recovery_")}


DISK: Final = (
    "kvstore_disk_blocks_total", "kvstore_disk_bytes_total", "kvstore_disk_ios_total", "kvstore_disk_syncs_total",
    "kvstore_disk_user_bytes_total", "kvstore_ssd_written_blocks_total", "kvstore_ssd_written_bytes_total",
)  # fmt: skip
TRANSFERS: Final = ("kvstore_transfer_blocks_total", "kvstore_transfer_bytes_total", "kvstore_transfer_seconds_count")
CAUSES: Final[dict[Callable[[Ground], None], tuple[str, ...]]] = {
    is_there_from_the_start: (
        "kvstore_build_info", "kvstore_tier_capacity_bytes", "kvstore_tier_high_watermark_ratio",
    ),
    time_passes: ("kvstore_uptime_seconds",),
    blocks_are_put: (
        "kvstore_buffer_used_bytes", "kvstore_call_seconds_count", "kvstore_dedup_ratio", "kvstore_namespaces",
        "kvstore_put_blocks_total", "kvstore_sessions_ended_total", "kvstore_tier_blocks", "kvstore_tier_used_bytes",
        *TRANSFERS,
    ),
    blocks_are_refused: ("kvstore_draining", "kvstore_put_refused_total", "kvstore_events_total", *DISK),
    blocks_are_read: (
        "kvstore_blocks_held", "kvstore_bookkeeping", "kvstore_copies", "kvstore_fetch_found_total",
        "kvstore_fetch_missed_total", "kvstore_leases", "kvstore_match_found_total", "kvstore_match_missed_total",
        "kvstore_sessions", "kvstore_tier_pinned_bytes",
    ),
    leases_and_sessions_run_out: ("kvstore_leases_expired_total", "kvstore_sessions_expired_total"),
    host_runs_over: (
        "kvstore_tier_demoted_total", "kvstore_tier_evicted_total", "kvstore_tier_fragmentation_ratio",
        "kvstore_tier_promoted_total", "kvstore_tier_removed_total",
    ),
    device_is_used: ("kvstore_reservations", "kvstore_tier_reserved_bytes"),
    codecs_save: (
        "kvstore_disk_saved_bytes", "kvstore_tier_saved_bytes", "kvstore_wire_bytes_total",
        "kvstore_wire_saved_bytes_total",
    ),
    calls_fail: ("kvstore_call_failures_total",),
    the_disk_stands_still: (
        "kvstore_calls_in_progress", "kvstore_fetch_busy_total", "kvstore_jobs", "kvstore_loads_refused_total",
        "kvstore_queue",
    ),
    the_disk_fails: (
        "kvstore_disk_degradations_total", "kvstore_disk_io_errors_total", "kvstore_disk_reads_total",
        "kvstore_ssd_reads_failed_total", "kvstore_ssd_writes_dropped_total", "kvstore_tier_dropped_total",
        "kvstore_tier_up", "kvstore_transfer_failures_total", "kvstore_warnings",
    ),
    the_disk_is_full: ("kvstore_disk_refused_total",),
    blocks_are_damaged: (
        "kvstore_corrupt_blocks_total", "kvstore_disk_corrupt_total", "kvstore_tier_quarantined_total",
    ),
    space_is_given_back: ("kvstore_disk_rewritten_bytes_total",),
    a_mover_fails: ("kvstore_mover_restarts_total",),
    everybody_waits: (
        "kvstore_locked_section_longest_us", "kvstore_locked_sections_over_total", "kvstore_loop_turn_longest_us",
        "kvstore_locked_work_longest_us", "kvstore_locked_work_over_total",
        "kvstore_loop_turns_over_total", "kvstore_loop_work_longest_us", "kvstore_loop_work_over_total",
    ),
    a_daemon_starts_again: (
        "kvstore_recovery_blocks", "kvstore_recovery_seconds", "kvstore_recovery_cut_bytes",
        "kvstore_recovery_quarantined",
    ),
}  # fmt: skip
"""What happens, and the metrics that tell of it."""


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_what_happens_is_told(ground: Ground, cause: Callable[[Ground], None]):
    ground.begin()
    cause(ground)
    ground.until_moved(*CAUSES[cause])


def test_each_metric_of_the_table_has_a_cause():
    told = [name for names in CAUSES.values() for name in names]
    assert len(told) == len(set(told))
    assert {name.removesuffix("_info").removesuffix("_count") for name in told} == {metric.name for metric in METRICS}
