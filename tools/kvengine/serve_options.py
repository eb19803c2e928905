"""The command line of ``kvengine serve``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from kvstore.core.errors import InvalidArgument
from kvstore.engine.service.limits import Limits
from kvstore.tools.kvengine.options import EngineOptions, add_engine, engine_options

EPILOG = """\
The port is plain HTTP: beyond loopback it is opened only with --api-keys, or with --insecure.
Exit codes: 0 ended by SIGTERM or Ctrl-C, 1 the engine failed, 2 usage, 3 no daemon answers on the socket, 4 the model
can not be served.
"""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and where."""

    engine: EngineOptions
    host: str
    port: int
    name: str
    keys: tuple[str, ...]
    limits: Limits
    drain_s: int


def parse(arguments: Sequence[str]) -> ServeOptions:
    """Read the command line; a wrong one ends the process with code 2 and says what would be right."""
    parser = argparse.ArgumentParser(
        prog="kvengine serve",
        description="Answer over HTTP as OpenAI's API does: /v1/completions, /v1/chat/completions, /v1/models, and "
        "/health and /metrics beside them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_server(parser.add_argument_group("server"))
    add_engine(parser)
    given = parser.parse_args(arguments)
    try:
        limits = Limits(
            requests_max=given.requests_max,
            choices_max=given.choices_max,
            timeout_s=given.timeout_s,
            stuck_s=given.stuck_s,
        )
        options = ServeOptions(
            engine=engine_options(given),
            host=given.host,
            port=given.port,
            name=given.name,
            keys=_keys(given.api_keys) if given.api_keys is not None else (),
            limits=limits,
            drain_s=given.drain_s,
        )
    except (OSError, InvalidArgument) as error:
        parser.error(str(error))
    if not 0 <= options.port <= 65535:
        parser.error(f"--port is {options.port}; expected 0 (any free one) to 65535")
    if not (options.keys or given.insecure or _is_loopback(options.host)):
        parser.error(f"--host {options.host} can be reached by others: give --api-keys FILE, or --insecure")
    return options


def _add_server(group: argparse._ArgumentGroup) -> None:
    default = Limits()
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 is any free one (default %(default)s)")
    group.add_argument("--name", default="", help="what clients call the model (default: its name in the cache)")
    group.add_argument("--api-keys", type=Path, metavar="FILE", help="a file with one key a line; clients need one")
    group.add_argument("--insecure", action="store_true", help="listen beyond loopback without keys")
    group.add_argument(
        "--requests-max", type=int, default=default.requests_max, help="answers at one time (default %(default)s)"
    )
    group.add_argument(
        "--choices-max", type=int, default=default.choices_max, help="largest n of a request (default %(default)s)"
    )
    group.add_argument(
        "--timeout-s", type=float, default=default.timeout_s, help="longest time of an answer (default %(default)g)"
    )
    group.add_argument(
        "--stuck-s",
        type=float,
        default=default.stuck_s,
        help="a request without progress for so long is cancelled (default %(default)g)",
    )
    group.add_argument(
        "--drain-s", type=int, default=30, help="how long SIGTERM waits for answers under way (default %(default)s)"
    )


def _keys(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise InvalidArgument("--api-keys", str(file), f"a UTF-8 file ({error})") from error
    if not lines:
        raise InvalidArgument("--api-keys", str(file), "a file with at least one key")
    return tuple(lines)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
