"""What ``kvctl`` answers a shell. docs/operations.md lists the same numbers, and a test compares them."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; each member's comment is its line in the documentation."""

    OK = 0
    """Done, and the answer is yes: everything matched, nothing bad was found."""
    NO = 1
    """Done, and the answer is no: not every block matched, a bad block or a fault of the set-up was found."""
    USAGE = 2
    """The command line, or a value in it, is wrong; the message names what would be right."""
    UNREACHABLE = 3
    """No daemon answers on the socket."""
    REFUSED = 4
    """The daemon said no: leased or pinned blocks, missing rights, a bound that is reached."""
    NOT_FOUND = 5
    """What was named is not known: a namespace, a block, a pin."""
    DEADLINE = 6
    """The answer did not come within --timeout."""
    FAILED = 7
    """The daemon failed inside; its log holds the traceback."""
    INTERRUPTED = 130
    """Ctrl-C."""


BY_STATUS = {
    "INVALID_ARGUMENT": Exit.USAGE,
    "NOT_FOUND": Exit.NOT_FOUND,
    "FAILED_PRECONDITION": Exit.REFUSED,
    "UNAUTHENTICATED": Exit.REFUSED,
    "PERMISSION_DENIED": Exit.REFUSED,
    "RESOURCE_EXHAUSTED": Exit.REFUSED,
    "DEADLINE_EXCEEDED": Exit.DEADLINE,
    "UNAVAILABLE": Exit.UNREACHABLE,
    "INTERNAL": Exit.FAILED,
}
"""Exit code of each status that an error of ``kvstore.core.errors`` may carry."""
