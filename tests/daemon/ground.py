"""A daemon over a disk that fails when it is told to, and what each scrape of it has moved."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.client import Client, ClientOptions
from kvstore.core.clock import Clock, ManualClock
from kvstore.core.namespace import NamespacePolicy
from kvstore.daemon import build
from kvstore.daemon import daemon as daemon_module
from kvstore.daemon.build import Tiers
from kvstore.daemon.config import Config
from kvstore.daemon.daemon import Daemon
from kvstore.daemon.turns import Turns, measured_loop
from kvstore.store.config import StoreConfig
from kvstore.store.store import Store
from kvstore.testing.faulty_disk import FaultyDisk
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdConfig, SsdTier
from kvstore.v1 import admin_pb2
from tests.client.harness import READY_SECONDS, blocks_of, chain, small_spec, until

MIB = 1 << 20
Samples = dict[tuple[str, ...], float]


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> Samples:
    """Values by name and labels, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(ask(port, "/metrics")[1])
        for sample in family.samples
    }


def moved(before: Samples, after: Samples) -> Samples:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


class Ground:
    """The daemon, its disk and its clock; ``moved`` has the names of metrics that ``look`` has seen change."""

    def __init__(self, daemon: Daemon, disk: FaultyDisk, clock: ManualClock, store: Store) -> None:
        self.daemon, self.disk, self.clock, self.store = daemon, disk, clock, store
        self.path, self.port = daemon._config.socket, daemon.metrics_port
        self._before: Samples = {}
        self.moved: set[str] = set()
        self._salts = iter(range(1000))

    def begin(self, *, from_nothing: bool = False) -> None:
        """What is exported from now on is compared with now, or with nothing at all."""
        self._before = {} if from_nothing else scrape(self.port)
        self.moved = set()

    def look(self) -> Samples:
        """Scrape; returns what differs from the beginning."""
        found = moved(self._before, scrape(self.port))
        self.moved |= {name for name, *_ in found}
        return found

    def until_moved(self, *names: str) -> None:
        """Look until these have moved: what threads do takes its time."""
        until(lambda: self.look() is not None and set(names) <= self.moved, seconds=5.0)

    @contextmanager
    def client(self, *, remote: bool = False) -> Iterator[Client]:
        """A client on the session socket, or without shared memory over TCP."""
        where = f"grpc://127.0.0.1:{self.daemon.grpc_port}" if remote else self.path
        with Client(where, ClientOptions(strict=True, buffer_bytes=MIB)) as made:
            yield made

    def put(self, client: Client, blocks: int, policy: NamespacePolicy | None = None, **spec: object) -> tuple:
        """A chain in a namespace of its own; returns the namespace's id and the keys."""
        opened = client.open_namespace(small_spec(salt=b"%d" % next(self._salts), **spec), policy=policy)
        keys, _ = chain(opened.namespace_id, blocks)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        return opened, keys

    def admin(self, client: Client, name: str, **fields: object) -> object:
        """An admin call."""
        request = getattr(admin_pb2, f"{name}Request")(**fields)
        answer = client.connection()[0].call(f"kvstore.v1.Admin/{name}", request.SerializeToString(), 10.0)
        return getattr(admin_pb2, f"{name}Response").FromString(answer)


def over(disk: FaultyDisk, config: Config, clock: Clock) -> Tiers:
    settings = SsdConfig(capacity_bytes=config.ssd, segment_bytes=config.ssd_segment, io_deadline_s=5.0)
    return Tiers(HostArena(config.host), MemfdDeviceArena(config.device), SsdTier("memory", settings, port=disk))


@contextmanager
def ground_over(disk: FaultyDisk, folder: Path, **changes: object) -> Iterator[Ground]:
    """A daemon on a loop whose turns are measured, with a clock that only tests turn."""
    clock, turns, ready = ManualClock(), Turns(), threading.Event()
    given = {
        "socket": folder / "s", "device": MIB, "device_kind": "shared", "host": MIB, "ssd": 16 * MIB,
        "ssd_dir": folder / "unused", "ssd_segment": MIB, "ssd_free_floor": 0, "metrics_listen": "0",
        "listen": "127.0.0.1:0", "loader_threads": 1, "writer_threads": 1,
    }  # fmt: skip
    config = Config(**{**given, **changes})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon_module, "build_tiers", lambda config, clock: over(disk, config, clock))
        patch.setattr(build, "StoreConfig", partial(StoreConfig, load_queue_max=1))
        made: list[Store] = []
        build_store = daemon_module.build_store
        patch.setattr(daemon_module, "build_store", lambda *given: made.append(build_store(*given)) or made[-1])
        daemons: list[Daemon] = []

        async def serve() -> None:
            daemons.append(Daemon(config, clock=clock, on_ready=ready.set, turns=turns))
            await daemons[0].run()

        def run() -> None:
            with asyncio.Runner(loop_factory=partial(measured_loop, turns)) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run, name="daemon")
        thread.start()
        try:
            assert ready.wait(READY_SECONDS)
            yield Ground(daemons[0], disk, clock, made[-1])
        finally:
            disk.release()
            disk.fail = lambda *_: 0
            daemons[0].stop()
            thread.join(READY_SECONDS)
