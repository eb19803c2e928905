"""What a start checks, and ``kvstored --check`` prints: what is asked for, what the machine allows, what mends it."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.lockfile import lock_holder
from kvstore.daemon.config import Config, format_size, rough_size
from kvstore.daemon.memory import OWN_BYTES, meminfo, memory_room
from kvstore.daemon.rights import make_tls
from kvstore.rpc.access import Policy
from kvstore.rpc.listener import check_socket_path, lock_file
from kvstore.tiers.device_probe import DeviceChoice, choose_device
from kvstore.tiers.host import locked_memory_hint
from kvstore.tiers.memfd import HUGE_PAGE, SHMEM_ENABLED
from kvstore.tiers.ssd.format import LOCK_NAME

DESCRIPTORS_BESIDE: Final = 1024
"""For gRPC's connections (512 calls), segments, journal, sockets, log."""

BUFFER_USUAL_BYTES: Final = 64 << 20
"""The buffer that a client asks for if nobody tells it otherwise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the plan. ``state`` is "ok", "warning" (it runs, but worse) or "error" (it will not run)."""

    subject: str
    state: str
    text: str


def make_plan(config: Config) -> list[Finding]:
    """Look at the machine; nothing is made or changed."""
    device, cuda = _device(config)
    # What lies on the GPU takes no memory of the host.
    arenas = config.host if cuda else config.host + config.device
    return [
        device,
        Finding("host", "ok", f"{format_size(config.host)} of shared memory, read-only to clients"),
        _memory(config, arenas),
        _huge_pages(arenas),
        _pinning(config, cuda=cuda),
        *_ssd(config),
        _sockets(config),
        *_access(config),
        _metrics(config),
        _descriptors(config),
        Finding(
            "limits",
            "ok",
            f"{config.sessions_max} sessions, buffers of at most {format_size(config.buffer_max)}, "
            f"leases of at most {config.lease_ttl_max_s} s",
        ),
    ]


def refusal(findings: list[Finding]) -> str:
    """Why the daemon does not start; empty if it does."""
    return "; ".join(f"{finding.subject}: {finding.text}" for finding in findings if finding.state == "error")


def plan_text(config: Config) -> tuple[str, bool]:
    """The plan for people, and whether the daemon would start."""
    findings = make_plan(config)
    width = max(len(finding.subject) for finding in findings)
    lines = [f"{f.subject:<{width}}  {f.state:<7}  {f.text}" for f in findings]
    return "\n".join(lines), all(finding.state != "error" for finding in findings)


def _device(config: Config) -> tuple[Finding, bool]:
    """The line about DEVICE, and whether it would lie on a GPU."""
    if not config.device:
        return Finding("device", "ok", "off"), False
    try:
        choice: DeviceChoice = choose_device(config.device_kind, config.device_index)
    except InvalidArgument as error:
        return Finding("device", "error", str(error)), False
    size = format_size(config.device)
    if choice.kind == "cuda":
        return Finding("device", "ok", f"{size} of GPU memory: {choice.reason}"), True
    state = "warning" if choice.gpu_unused else "ok"
    return Finding("device", state, f"{size} of shared memory: {choice.reason}"), False


def _memory(config: Config, arenas: int) -> Finding:
    """Arenas are taken at once, buffers one by one: the kernel must be able to give all of them."""
    room = memory_room()
    # Huge pages that are set aside are no longer among what is available.
    reserved = meminfo("HugePages_Free", unit=1) * HUGE_PAGE >= arenas
    wanted = 0 if reserved else arenas
    buffers = config.buffers_max or room.buffers(wanted)
    limit = "none" if room.limit is None else f"{rough_size(room.limit)}, {rough_size(room.left)} of it left"
    text = (
        f"arenas take {rough_size(arenas)} and buffers of sessions up to {rough_size(buffers)} of "
        f"{rough_size(room.available)} available; container limit {limit}"
    )
    if wanted + config.buffers_max + OWN_BYTES > room.nbytes:
        return Finding(
            "memory",
            "error",
            f"{text}: make host, device or buffers_max smaller, or raise the container's memory limit",
        )
    if buffers < BUFFER_USUAL_BYTES:
        return Finding("memory", "warning", f"{text}: too little for one client's usual buffer")
    if wanted > 0.9 * room.nbytes:
        return Finding("memory", "warning", f"{text}: little is left for buffers and everything else")
    return Finding("memory", "ok", text)


def _huge_pages(wanted: int) -> Finding:
    free = meminfo("HugePages_Free", unit=1)
    needed = -(-wanted // HUGE_PAGE)
    if free >= needed:
        return Finding("huge pages", "ok", f"{free} reserved pages of 2 MiB are free; {needed} are needed")
    mode = _shmem_mode()
    if mode in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", "ok", f"transparent huge pages for shared memory ({mode})")
    return Finding(
        "huge pages",
        "warning",
        f"ordinary 4 KiB pages, which halve the speed of direct disk reads: echo advise | sudo tee {SHMEM_ENABLED}, "
        f"or sudo sysctl vm.nr_hugepages={needed}",
    )


def _pinning(config: Config, *, cuda: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not cuda:
        text = "without limit" if soft == resource.RLIM_INFINITY else f"limited to {rough_size(soft)}"
        return Finding("pinning", "ok", f"not used, since no GPU is used; locked memory is {text}")
    if soft != resource.RLIM_INFINITY and soft < config.host:
        return Finding("pinning", "warning", f"HOST may not be pinned: {locked_memory_hint()}")
    return Finding("pinning", "ok", "HOST is registered with CUDA")


def _ssd(config: Config) -> list[Finding]:
    if not config.ssd or config.ssd_dir is None:
        return [Finding("ssd", "ok", "off: blocks do not survive the daemon")]
    folder = _existing(config.ssd_dir)
    if not os.access(folder, os.W_OK | os.X_OK):
        return [Finding("ssd", "error", f"{folder} is not writable by uid {os.getuid()}: choose another ssd_dir")]
    if holder := lock_holder(config.ssd_dir / LOCK_NAME):
        return [Finding("ssd", "error", f"another kvstored (pid {holder}) holds {config.ssd_dir}")]
    disk = shutil.disk_usage(folder)
    files = config.ssd_dir.rglob("*") if folder == config.ssd_dir else ()
    held = sum(file.stat().st_blocks * 512 for file in files if file.is_file())
    text = (
        f"at most {format_size(config.ssd)} in {config.ssd_dir}, which holds {rough_size(held)}; "
        f"disk has {rough_size(disk.free)} free, of which {format_size(config.ssd_free_floor)} are left to others"
    )
    if held + max(0, disk.free - config.ssd_free_floor) < config.ssd:
        return [Finding("ssd", "warning", f"{text}: the disk is smaller than ssd, so less will be used")]
    return [Finding("ssd", "ok", text)]


def _sockets(config: Config) -> Finding:
    for path in (config.socket, config.grpc_socket):
        try:
            check_socket_path(path)
        except InvalidArgument as error:
            return Finding("sockets", "error", str(error))
    folder = _existing(config.socket.parent)
    text = f"{config.socket} mode {config.socket_mode:o}"
    if config.grpc:
        text += f", gRPC at {config.grpc_socket}"
    text += f", TCP at {config.listen}" if config.listen else ", TCP off"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("sockets", "error", f"{text}: {folder} is not writable by uid {os.getuid()}")
    if holder := lock_holder(lock_file(config.socket)):
        return Finding("sockets", "error", f"another kvstored (pid {holder}) serves at {config.socket}")
    return Finding("sockets", "ok", text)


def _access(config: Config) -> list[Finding]:
    """Lines about policy and certificate, where there are any: a start reads the same files."""
    found = []
    if config.policy is not None:
        try:
            policy = Policy.read(config.policy)
        except InvalidArgument as error:
            found.append(Finding("policy", "error", str(error)))
        else:
            text = f"{config.policy}: {len(policy.tokens)} tokens, {len(policy.uids)} users; nobody else has rights"
            found.append(Finding("policy", "ok", text))
    try:
        if make_tls(config) is not None:
            asked = "clients show a certificate" if config.tls_client_ca is not None else "of the server"
            found.append(Finding("tls", "ok", f"{config.tls_cert}, {asked}"))
    except InvalidArgument as error:
        found.append(Finding("tls", "error", str(error)))
    if config.listen and config.insecure_tcp:
        found.append(Finding("tls", "warning", "insecure_tcp: whoever reaches the TCP port may read and write all"))
    return found


def _metrics(config: Config) -> Finding:
    if config.metrics_address is None:
        return Finding("metrics", "ok", "off")
    host, port = config.metrics_address
    if find_spec("prometheus_client") is None:
        return Finding("metrics", "error", "prometheus-client is missing: pip install 'tiered-kvstore[daemon]'")
    return Finding("metrics", "ok", f"http://{host}:{port}/metrics and /healthz")


def _descriptors(config: Config) -> Finding:
    """A session takes its socket and its buffer; gRPC, SSD and the daemon itself take some too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * config.sessions_max + DESCRIPTORS_BESIDE
    text = f"{needed} are needed for {config.sessions_max} sessions; the limit is {hard}"
    if hard < needed:
        return Finding("descriptors", "warning", f"{text}: raise LimitNOFILE, or lower sessions_max")
    return Finding("descriptors", "ok", text)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _shmem_mode() -> str:
    try:
        return SHMEM_ENABLED.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "never"
