"""The data calls: one table, a row a verb, shared by both ends of the wire.

A row says all that the ends have to know of a call: name and messages, how a client packs its arguments and reads the
reply, what it answers without a daemon, how a late reply is undone, whether it may be sent again and how long it may
wait; and how the daemon unpacks the request, asks the session and packs the reply, and where. A new verb is a message
and a row: ``register`` enters one at run time, too, and then both clients call it with ``client.call(row, ...)`` over
both transports. Read ``base.py`` first; it must know nothing of transports.
"""

from __future__ import annotations

from typing import Any, Final

from kvstore.core.errors import InvalidArgument
from kvstore.wire.verbs import leases, plans, reads, writes
from kvstore.wire.verbs.base import Asked, Ids, KnownNamespace, Method, Runs, Served, Verb

__all__ = ["VERBS", "Asked", "Ids", "KnownNamespace", "Method", "Runs", "Served", "Verb", "register"]

VERBS: Final[dict[str, Method]] = {}
"""Every data verb by full name, as it stands in a gRPC path without the first slash."""


def register(verb: Verb[Any]) -> None:
    """Enter a row. Daemons of this process serve it from now on. Raises InvalidArgument if the name is taken."""
    if VERBS.setdefault(verb.name, verb) is not verb:
        raise InvalidArgument("verb.name", verb.name, "a name that no verb has")


for _verb in (*writes.VERBS, *reads.VERBS, *leases.VERBS, *plans.VERBS):
    register(_verb)
