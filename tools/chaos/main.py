"""``python -m kvstore.tools.chaos``: rounds of trouble until the minutes are over, then what was found.

A round is one daemon with a configuration, processes of traffic and kinds of trouble that the seed and the round's
number choose; how the machine interleaves them is not the seed's. Exit status 1 if anything was found.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.core.errors import KVStoreError
from kvstore.tools.chaos import cancelling, disks, forks, lapses, tenants, traffic
from kvstore.tools.chaos.base import settle, warm_up
from kvstore.tools.chaos.ground import Findings, Ground

KINDS: Final[dict[str, Callable[[Ground], None]]] = {
    "stopped-reader": lapses.stopped_reader,
    "views-kept": lapses.views_kept,
    "equal-keys": tenants.equal_keys,
    "forked": forks.forked,
    "cancelled-gets": cancelling.cancelled_gets,
    "cancelled-puts": cancelling.cancelled_puts,
    "cancelled-connects": cancelling.cancelled_connects,
    "cancelled-calls": cancelling.cancelled_calls,
    "late-gets": disks.late_gets,
    "large-put": disks.large_put,
    "long-contexts": disks.long_contexts,
    "full-disk": disks.full_disk,
    "killed-daemon": disks.killed_daemon,
    "stopped-daemon": disks.stopped_daemon,
}
ALONE: Final = {"full-disk", "long-contexts", "late-gets", "large-put", "cancelled-puts", "killed-daemon", "equal-keys"}
"""Kinds that judge what stays in small tiers: traffic beside them would evict it, and be to blame."""
FLAGS: Final[dict[str, dict[str, str]]] = {"cancelled-gets": {"host": "96 MiB"}}
"""Flags of the daemon that a kind needs other than usual: copies that take long enough to be cut."""
NAMES: Final = ", ".join(KINDS)


def disturb(ground: Ground, process: subprocess.Popen[str], fate: str) -> None:
    """Stop a process of traffic past its leases, kill it, or leave it alone."""
    if fate == "killed":
        process.kill()
    elif fate == "stopped" and process.poll() is None:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.4)
        os.kill(process.pid, signal.SIGCONT)
    traffic.end(ground, process)


def round_of(number: int, seed: int, names: list[str], findings: Findings) -> None:
    """One daemon, its troubles, and quiescence."""
    rng = random.Random(f"{seed} {number}")
    name = names[number % len(names)] if number < len(names) else rng.choice(names)
    with tempfile.TemporaryDirectory(prefix="kvchaos-") as folder:
        ground = Ground.make(Path(folder), rng, findings, **FLAGS.get(name, {}))
        with ground.daemon:
            try:
                ground.daemon.start()
                base = warm_up(ground)
                lonely = name in ALONE or rng.random() < 0.5
                beside = [] if lonely else [traffic.start(ground, rng.uniform(2, 5)) for _ in range(2)]
                fates = [rng.choice(("left", "stopped", "killed")) for _ in beside]
                try:
                    KINDS[name](ground)
                finally:
                    for process, fate in zip(beside, fates, strict=True):
                        disturb(ground, process, fate)
                settle(ground, base, name)
            except (KVStoreError, OSError, LookupError, RuntimeError, ValueError) as error:
                findings.add(f"failure: {name}", f"{type(error).__name__}: {error}".splitlines()[0])


def run(
    minutes: Annotated[float, typer.Option(help="How long; the round under way is finished.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Chooses all that is chosen.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help=f"Kinds of trouble; all if not given: {NAMES}.")] = None,
    rounds: Annotated[int, typer.Option(help="End after so many rounds; 0 for the time alone.")] = 0,
) -> None:
    """Make trouble, check every HIT, compare all rights at the end of each round; exit status 1 with findings."""
    names = only if only else list(KINDS)
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is not one of {NAMES}")
    findings, begin, number = Findings(), time.monotonic(), 0
    while time.monotonic() - begin < minutes * 60 and not (rounds and number >= rounds):
        round_of(number, seed, names, findings)
        number += 1
    spent = (time.monotonic() - begin) / 60
    print(f"{number} rounds in {spent:.1f} minutes, seed {seed}: {findings.hits} HITs checked")
    for kind, count in sorted(findings.counts.items()):
        print(f"{count:6}  {kind}: {findings.first[kind]}")
    print(f"{sum(findings.counts.values())} findings of {len(findings.counts)} kinds")
    sys.exit(1 if findings.counts else 0)


def main() -> None:
    """Console entry."""
    typer.run(run)
