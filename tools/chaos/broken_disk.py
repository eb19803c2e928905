"""``kvstored`` on a disk that fails while a file named ``broken`` lies beside its socket: writes and syncs give EIO."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstore.daemon.main import main
from kvstore.tiers.ssd import port

EVERY: Final = 3
"""One in so many operations fails: some of a batch get through, some do not."""


def failing(real: Callable[..., Any], switch: Path) -> Callable[..., Any]:
    """``real``, with EIO now and then while ``switch`` exists."""
    numbers = itertools.count(1)

    def call(*args: Any, **named: Any) -> Any:
        if switch.exists() and next(numbers) % EVERY == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **named)

    return call


def break_disks(switch: Path) -> None:
    """Let every disk of this process fail while ``switch`` exists."""
    for disk in vars(port).values():
        if isinstance(disk, type) and disk.__module__ == port.__name__ and "fdatasync" in vars(disk):
            for name in ("pwrite", "fdatasync"):
                setattr(disk, name, failing(getattr(disk, name), switch))


if __name__ == "__main__":
    break_disks(Path(sys.argv[sys.argv.index("--socket") + 1]).with_name("broken"))
    main()
