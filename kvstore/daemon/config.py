"""The configuration: one TOML file, one reader. The text of each key is what ``--help`` and ``--print-config`` show.

Unknown keys are refused. Flags of ``kvstored`` override the file. Sizes are bytes, or text such as "64 MiB".
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvstore.core.errors import InvalidArgument
from kvstore.core.sizes import parse_size
from kvstore.core.types import Tier
from kvstore.store.eviction.contract import policies
from kvstore.store.eviction.policies import DEFAULT
from kvstore.store.guarantees import Guarantee, parse_all
from kvstore.wire.paths import default_socket, grpc_socket

_LOOPBACK: Final = re.compile(r"(127\.\d+\.\d+\.\d+|localhost|\[::1\]):(\d+)")
_METRICS: Final = re.compile(r"(?:([^\s:\[\]/]+|\[[0-9a-fA-F:]+\])?:)?(\d{1,5})")
_ADDRESS: Final = re.compile(r"([^\s:\[\]/]+|\[[0-9a-fA-F:]+\]):(\d+)")
_PORT_MAX: Final = 65_535
_WORDS: Final = {
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
}
"""What pydantic's kinds of errors say here."""

_SIZES: Final = ("device", "host", "ssd", "ssd_free_floor", "ssd_segment", "buffer_max", "buffers_max")


def format_size(nbytes: int) -> str:
    """Bytes in the largest binary unit that divides them: 67108864 is "64 MiB"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return str(nbytes)


def rough_size(nbytes: int) -> str:
    """Bytes for people, in the largest unit of which there is one: 23302725632 is "21.7 GiB"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if round(nbytes / unit, 1) >= 1:
            return f"{nbytes / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{nbytes} bytes"


def parse_mode(value: object) -> int:
    """Permission bits of "600" or 0o600. ValueError if they are none."""
    mode = value
    if isinstance(value, str):
        mode = int(value, 8) if re.fullmatch("(0o)?[0-7]{1,4}", value) else None
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777:
        raise ValueError("octal text such as '600'")
    return mode


Size = Annotated[int, BeforeValidator(parse_size)]
Mode = Annotated[int, BeforeValidator(parse_mode)]


class Config(BaseModel):
    """Everything that can be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: Path = Field(
        default_factory=default_socket,
        description="Session socket of same-host clients; gRPC listens beside it at the same name with .grpc.",
    )
    socket_mode: Mode = Field(0o600, description="Permission bits of both socket files, octal.")
    grpc: bool = Field(True, description="Serve gRPC on its Unix socket.")
    listen: str = Field(
        "",
        description="Also serve gRPC at this TCP address, such as 127.0.0.1:7070. Off if empty. Beyond loopback it "
        "needs tls_cert, tls_key, and a policy or tls_client_ca (or insecure_tcp).",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the TCP port's certificate chain; SIGHUP reads it again."
    )
    tls_key: Path | None = Field(None, description="PEM file of its key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authority whose certificates clients of the TCP port must have (mutual TLS)."
    )
    policy: Path | None = Field(
        None,
        description="TOML file that says which bearer tokens and users may read, write and administer which "
        "namespaces (see security.md); SIGHUP reads it again. Without one all callers have data rights.",
    )
    insecure_tcp: bool = Field(
        False,
        description="Open listen beyond loopback without TLS or without asking who calls. Anybody reads anything.",
    )
    metrics_listen: str = Field(
        "",
        description="Serve metrics for Prometheus at /metrics, and /healthz, over HTTP at this port, such as 9464, or "
        "address, such as 0.0.0.0:9464. A port alone is loopback. Off if empty. Needs the extra daemon.",
    )
    admin_uids: tuple[int, ...] = Field(
        (), description="Users that have admin rights on the sockets, beside root and the daemon's own."
    )
    device: Size = Field(64 << 20, description="Size of the DEVICE arena; 0 for none.")
    device_kind: str = Field(
        "auto",
        pattern="^(auto|shared|cuda)$",
        description="Where the DEVICE arena lies: shared (memory of the host), cuda (a GPU; refused without one), or "
        "auto: cuda if there is an NVIDIA device node and torch.cuda.is_available(), else shared.",
    )
    device_index: int = Field(0, ge=0, le=255, description="Which CUDA device holds the DEVICE arena, as torch counts.")
    device_uids: tuple[int, ...] = Field(
        (),
        description="Users that may map DEVICE where it is on a GPU, beside root and the daemon's own: each of them "
        "can write all of it (see security.md). Others get no DEVICE. Shared memory is read-only to everybody.",
    )
    host: Size = Field(256 << 20, description="Size of the HOST arena.")
    index_map: bool = Field(
        True,
        description="Let clients on this host that map HOST map the index of blocks as well, read-only: a match is "
        "then no call. It shows them digests of keys and which tiers have them, of all tenants (see security.md).",
    )
    ssd: Size = Field(0, description="Most bytes on disk, metadata included; 0 for no SSD tier.")
    ssd_dir: Path | None = Field(None, description="Directory of the SSD tier; made if it is missing.")
    ssd_free_floor: Size = Field(1 << 30, description="Free space of the disk that the SSD tier leaves to others.")
    ssd_recovery: str = Field(
        "normal",
        pattern="^(normal|strict)$",
        description="What damage found at start does that a crash does not explain: normal sets it aside and goes on; "
        "strict refuses to start and names the file.",
    )
    ssd_fragmentation: float = Field(
        0.3, gt=0, le=1, description="Share of dead bytes on SSD above which live blocks are moved together."
    )
    ssd_io_deadline_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Seconds after which a disk operation counts as stalled: what waited is a miss, the tier degrades.",
    )
    ssd_segment: Size = Field(
        1 << 30,
        description="Size of a segment file, a multiple of 4 KiB; less under a small ssd (which has at least 16 "
        "segments), more under a large one (at most 512).",
    )
    high_watermark: float = Field(0.95, gt=0, le=1, description="Share of a tier in use above which it is reclaimed.")
    low_watermark: float = Field(0.90, gt=0, le=1, description="Share of a tier in use at which reclaiming stops.")
    device_eviction: str = Field(DEFAULT, description="Name of the policy that says which block leaves DEVICE first.")
    host_eviction: str = Field(DEFAULT, description="The same for HOST.")
    ssd_eviction: str = Field(DEFAULT, description="The same for SSD.")
    guarantees: tuple[str, ...] = Field(
        (),
        description="Bytes that eviction leaves to a tenant on a tier: texts of TENANT, host or ssd, BYTES, such as "
        "'team-a host 64 MiB'. A tenant is a salt as text, - without one. Together at most low_watermark of the tier.",
    )
    buffer_max: Size = Field(4 << 30, description="Largest private buffer that one session may ask for.")
    buffers_max: Size = Field(
        0,
        description="Most bytes of all sessions' buffers together; 0: three quarters of what the machine, or the "
        "container's limit, has left beside the arenas at start.",
    )
    sessions_max: int = Field(1024, ge=1, le=65535, description="Most sessions at one time.")
    peer_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Part of sessions, leases, reservations, jobs, buffers and opened namespaces that one uid, or one "
        "remote address, may take. 1 lets one take all.",
    )
    lease_ttl_max_s: int = Field(600, ge=1, le=86400, description="Longest time to live of a lease, in seconds.")
    loader_threads: int = Field(2, ge=1, le=64, description="Threads that promote blocks.")
    writer_threads: int = Field(2, ge=1, le=64, description="Threads that write blocks to SSD.")
    drain_timeout_s: int = Field(
        30, ge=0, le=3600, description="Longest time that SIGTERM waits for blocks to be written to SSD, in seconds."
    )
    watchdog_s: float = Field(
        5.0, ge=0.1, le=600, description="Seconds without a turn of the event loop after which all stacks are logged."
    )
    log_format: str = Field(
        "text", pattern="^(text|json)$", description="text, or json: an object a line, for what collects logs."
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error.")

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.host < 1 << 20:
            raise InvalidArgument("host", self.host, "at least 1 MiB")
        if self.low_watermark > self.high_watermark:
            raise InvalidArgument("low_watermark", self.low_watermark, f"at most {self.high_watermark}, high_watermark")
        if self.ssd_segment < 64 << 10 or self.ssd_segment % 4096:
            raise InvalidArgument("ssd_segment", self.ssd_segment, "a multiple of 4096, at least 65536")
        if self.ssd and self.ssd_dir is None:
            raise InvalidArgument("ssd_dir", "unset", "a directory, since ssd is not 0")
        if self.listen:
            self._check_listen()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("tls_cert", str(self.tls_cert), "a file beside tls_key, or neither of them")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("tls_client_ca", str(self.tls_client_ca), "tls_cert and tls_key beside it")
        _ = self.metrics_address, self.promised
        for key in ("device_eviction", "host_eviction", "ssd_eviction"):
            if (name := getattr(self, key)) not in policies():
                raise InvalidArgument(key, repr(name), " or ".join(policies()))
        return self

    def _check_listen(self) -> None:
        loopback, address = _LOOPBACK.fullmatch(self.listen), _ADDRESS.fullmatch(self.listen)
        if address is None:
            raise InvalidArgument("listen", repr(self.listen), "an address such as 127.0.0.1:7070 or [::]:7070")
        if int(address[2]) > _PORT_MAX:
            raise InvalidArgument("listen", repr(self.listen), f"a port of at most {_PORT_MAX}; 0 takes any")
        asked = self.policy is not None or self.tls_client_ca is not None
        if loopback is None and not self.insecure_tcp and (self.tls_cert is None or not asked):
            raise InvalidArgument(
                "listen",
                repr(self.listen),
                "a loopback address such as 127.0.0.1:7070; beyond it tls_cert, tls_key, and a policy or tls_client_ca "
                "(insecure_tcp opens it all the same)",
            )

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of ``metrics_listen``; None if metrics are off. Raises InvalidArgument."""
        if not self.metrics_listen:
            return None
        found = _METRICS.fullmatch(self.metrics_listen)
        if found is None or int(found[2]) > _PORT_MAX:
            raise InvalidArgument(
                "metrics_listen", repr(self.metrics_listen), "a port, or an address such as [::1]:9464"
            )
        return (found[1] or "127.0.0.1").strip("[]"), int(found[2])

    @property
    def promised(self) -> tuple[Guarantee, ...]:
        """What ``guarantees`` says. Raises InvalidArgument."""
        room = {Tier.HOST: int(self.host * self.low_watermark), Tier.SSD: int(self.ssd * self.low_watermark)}
        return parse_all(self.guarantees, room)

    @property
    def grpc_socket(self) -> Path:
        """Where gRPC listens."""
        return grpc_socket(self.socket)


def notify_address() -> str:
    """Where systemd waits to be told (``Type=notify``); "" if it does not."""
    return os.environ.get("NOTIFY_SOCKET", "")


def load(path: Path | None, overrides: dict[str, object]) -> Config:
    """Read the file (if any), put the overrides on top, check. Raises InvalidArgument naming each wrong key."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise InvalidArgument("config", str(path), f"a file that can be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument("config", str(path), f"TOML ({error})") from error
    values.update(overrides)
    try:
        return Config(**values)
    except ValidationError as error:
        raise _as_invalid(error) from error


def _as_invalid(error: ValidationError) -> InvalidArgument:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "config"
    if first["type"] == "extra_forbidden":
        known = ", ".join(Config.model_fields)
        return InvalidArgument(field, "no key", f"one of {known}")
    context = first.get("ctx", {})
    if first["type"] == "string_pattern_mismatch":
        choices = str(context["pattern"]).strip("^()$").replace("|", ", ")
        return InvalidArgument(field, repr(first["input"])[:200], f"one of {choices}")
    words = _WORDS.get(first["type"], str(first["msg"]).removeprefix("Value error, "))
    return InvalidArgument(field, repr(first["input"])[:200], words.format(**context))


def describe(name: str) -> str:
    """The text of a key."""
    return Config.model_fields[name].description or name


def print_config(config: Config) -> str:
    """The configuration as a TOML file, each key under its text."""
    lines = ['# Configuration of kvstored. Sizes are bytes, or text such as "64 MiB".']
    for name in Config.model_fields:
        lines += ["", f"# {describe(name)}", _toml_line(name, getattr(config, name))]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: object) -> str:
    if value is None:
        return f'# {name} = ""'
    if name == "socket_mode":
        return f'{name} = "{value:o}"'
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    if isinstance(value, int) and name in _SIZES:
        return f'{name} = "{format_size(value)}"'
    if isinstance(value, int | float):
        return f"{name} = {value}"
    if isinstance(value, tuple):
        return f"{name} = [{', '.join(json.dumps(item) for item in value)}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'{name} = "{text}"'
