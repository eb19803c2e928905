"""A ``kvstored`` of one's own: started in a folder, ready when its socket answers, stopped or killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockKey, NamespaceId, Tier
from kvstore.tools.kvctl.connect import DaemonPort, connect_daemon
from kvstore.v1 import admin_pb2, common_pb2

READY_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 60.0
EVICT_TRIES: Final = 100
EVICT_PAUSE_SECONDS: Final = 0.05
_POLL_SECONDS: Final = 0.02
KVSTORED: Final = (sys.executable, "-m", "kvstore.daemon.main")


class DaemonProcess(AbstractContextManager["DaemonProcess"]):
    """One daemon at a time on one folder; ``flags`` are those of kvstored, such as ``{"host": "256 MiB"}``.

    Socket, log and (where ``flags`` ask for an SSD tier) data lie in the folder, which stays when the daemon ends, so
    that a second ``start`` finds the data of the first. ``command`` is what flags are given to.
    """

    def __init__(self, folder: Path, flags: dict[str, str], command: Sequence[str] = KVSTORED) -> None:
        self.socket = folder / "kvstored.sock"
        self.log = folder / "kvstored.log"
        self._flags = flags
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id. Unavailable if it does not run."""
        if self._process is None:
            raise Unavailable("the daemon was not started")
        return self._process.pid

    @property
    def tcp_port(self) -> int:
        """Port of gRPC over TCP, from its log. Unavailable without ``listen`` in ``flags``, or before it is ready."""
        found = re.findall(r"TCP port (\d+)", self.log.read_text(errors="replace"))
        if not found:
            raise Unavailable(f"kvstored does not listen on TCP; its log:\n{self.log_tail()}")
        return int(found[-1])

    def start(self) -> float:
        """Start and wait until it serves; returns the seconds that took. Unavailable with the log if it ends."""
        begin = time.monotonic()
        command = [*self._command, "--socket", str(self.socket)]
        # The same arena on every machine, so that figures compare and no run depends on a GPU.
        command += ["--device-kind", "shared"]
        for name, value in self._flags.items():
            command += [f"--{name}", value]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        while time.monotonic() - begin < READY_SECONDS_MAX:
            if self._process.poll() is not None:
                raise Unavailable(f"kvstored ended with {self._process.returncode}; its log:\n{self.log_tail()}")
            try:
                with_session = self.connect()
            except KVStoreError:
                time.sleep(_POLL_SECONDS)
                continue
            with_session.close()
            return time.monotonic() - begin
        raise Unavailable(f"kvstored was not ready within {READY_SECONDS_MAX:g} s; its log:\n{self.log_tail()}")

    def connect(self) -> DaemonPort:
        """An admin session."""
        return connect_daemon(str(self.socket), 5.0)

    def status(self) -> admin_pb2.StatusResponse:
        """What ``kvctl status`` shows."""
        port = self.connect()
        try:
            return port.call("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse, 10.0)
        finally:
            port.close()

    def evict(self, tier: Tier, namespace: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Demote or drop blocks from a tier, as ``kvctl evict`` does.

        Unavailable if some are still in use after a while: the daemon may need a moment to see that their reader left.
        """
        wire_tier = common_pb2.Tier.Value(f"TIER_{tier.name}")
        packed = b"".join(keys)
        request = admin_pb2.EvictRequest(tier=wire_tier, namespace_id=namespace, keys=packed)  # type: ignore[arg-type]
        port = self.connect()
        try:
            for _ in range(EVICT_TRIES):
                answer = port.call("Admin/Evict", request, admin_pb2.EvictResponse, 30.0)
                if common_pb2.OUTCOME_BUSY not in answer.outcomes:
                    return
                time.sleep(EVICT_PAUSE_SECONDS)
        finally:
            port.close()
        raise Unavailable(f"some of {len(keys)} blocks are still in use on {tier.name}")

    def stop(self) -> None:
        """End it in order: blocks in memory are written to SSD first. Idempotent."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does. Idempotent."""
        self._end(signal.SIGKILL)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            tail = self.log_tail()
            raise Unavailable(f"kvstored did not end within {STOP_SECONDS_MAX:g} s; its log:\n{tail}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
