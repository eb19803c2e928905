"""``kvstored`` that breaks its word in the way that its first argument names: what the judge must find."""

from __future__ import annotations

import itertools
import sys

from kvstore.daemon.main import main
from kvstore.store import recovery
from kvstore.store.moves.durable import Durably
from kvstore.tiers.ssd.commit import Committer

NTH = 25
_numbers = itertools.count(1)


def acknowledge_early() -> None:
    """Nobody waits for the sync of what is to be durable."""
    Committer.wait = lambda _self, _pending: None


def forget_records() -> None:
    """Now and then records do not come to the journal."""
    submit = Committer.submit

    def submit_most(self, records, *more):
        return submit(self, records if next(_numbers) % NTH else b"", *more)

    Committer.submit = submit_most


def take_memory_for_disk() -> None:
    """A block that is in memory only counts as durable when it is put again."""
    Durably.is_durable = lambda _self, _slot: True


def skip_in_recovery() -> None:
    """A start overlooks some of the blocks on disk."""
    register = recovery.register_blocks
    recovery.register_blocks = lambda state, blocks, known: register(
        state, [block for block in blocks if block.key[0] % NTH], known
    )


if __name__ == "__main__":
    {way.__name__: way for way in (acknowledge_early, forget_records, take_memory_for_disk, skip_in_recovery)}[
        sys.argv.pop(1)
    ]()
    main()
