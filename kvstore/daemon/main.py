"""The command ``kvstored``: foreground; one TOML file, flags on top, a plan with ``--check``."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvstore import __version__
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.daemon.collector import keep_to_the_young
from kvstore.daemon.config import Config, describe, load, print_config
from kvstore.daemon.daemon import Daemon
from kvstore.daemon.logs import set_up_logging
from kvstore.daemon.plan import make_plan, plan_text, refusal
from kvstore.daemon.turns import Turns, measured_loop
from kvstore.rpc.listener import raise_descriptor_limit

EXIT_CONFIG: Final = 2
EXIT_START: Final = 1
SWITCH_SECONDS: Final = 0.0005

log = logging.getLogger("kvstored")


def _serve(**given: Any) -> None:
    """Read the configuration and run."""
    if given.pop("version"):
        print(__version__)
        return
    check, show, file = given.pop("check"), given.pop("print_config"), given.pop("config")
    try:
        loaded = load(file, {name: value for name, value in given.items() if value not in (None, [])})
    except InvalidArgument as error:
        print(f"kvstored: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_CONFIG) from error
    if show:
        print(print_config(loaded), end="")
        return
    if check:
        text, would_start = plan_text(loaded)
        print(text)
        raise typer.Exit(0 if would_start else EXIT_START)
    _run(loaded)


def make_app() -> typer.Typer:
    """The command line: a flag for each key of the configuration, helped by the same text."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    parameters = [
        _parameter("config", Path | None, None, typer.Option("--config", help="TOML file; flags override it.")),
        _parameter("check", bool, False, typer.Option("--check", help="Check, print the plan, do not start.")),
        _parameter("print_config", bool, False, typer.Option("--print-config", help="Print it as TOML, do not start.")),
        _parameter("version", bool, False, typer.Option("--version", help="Print the version.")),
        *(_key_parameter(name) for name in Config.model_fields),
    ]

    def serve(**given: Any) -> None:
        _serve(**given)

    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(help="The tiered KV-cache memory service of one node, in the foreground.")(serve)
    return app


def _key_parameter(name: str) -> inspect.Parameter:
    flag, kind = f"--{name.replace('_', '-')}", Config.model_fields[name].annotation
    if kind is bool:
        return _parameter(name, bool | None, None, typer.Option(f"{flag}/--no-{flag[2:]}", help=describe(name)))
    if kind == tuple[int, ...]:
        return _parameter(name, list[int] | None, None, typer.Option(flag, help=describe(name)))
    return _parameter(name, str | None, None, typer.Option(flag, help=describe(name), metavar="VALUE"))


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    option.show_default = False
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _run(config: Config) -> None:
    set_up_logging(config.log_level, config.log_format)
    raise_descriptor_limit()
    findings = make_plan(config)
    if why := refusal(findings):
        log.error("not started: %s", why)
        raise typer.Exit(EXIT_START)
    for finding in findings:
        if finding.state == "warning":
            log.warning("%s: %s", finding.subject, finding.text)
    # A thread that copies in small steps may else keep the loop from its turn for 5 ms.
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        turns = Turns()
        with asyncio.Runner(loop_factory=partial(measured_loop, turns)) as runner:
            runner.run(Daemon(config, turns=turns, on_ready=keep_to_the_young).run())
    except (KVStoreError, OSError) as error:
        log.error("not started, or ended: %s", error)
        raise typer.Exit(EXIT_START) from error


def main() -> None:
    """Entry point."""
    make_app()()


if __name__ == "__main__":
    main()
