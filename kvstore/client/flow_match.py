"""A match without a call, where the daemon lets this client map its index. No I/O; see ``flows.py``.

What the map finds is there; what it does not find is asked for, so the reason of a miss is always the daemon's, and a
client that can not map (another host, no extension, ``index_map = false``) differs in time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.cache import MatchResult
from kvstore.client.steps import Flow
from kvstore.core.types import BATCH_KEYS_MAX, BlockKey, NamespaceId

if TYPE_CHECKING:
    from kvstore.client.flows import Flows


class Matches:
    """The flow that matches."""

    def __init__(self, flows: Flows) -> None:
        self._flows = flows

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Flow[MatchResult]:
        """See ``Cache.match``."""
        flows = self._flows
        found = self._mapped(namespace_id, keys)
        flows.state.mapped += len(found)
        if found and len(found) == len(keys):
            return MatchResult(len(found), found)
        rest = yield from flows.run(flows.operations.match(namespace_id, keys[len(found) :] if found else keys))
        if not found:
            return rest
        return MatchResult(len(found) + rest.matched, found + rest.residency, rest.reason)

    def _mapped(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """Residency of the first blocks of the run, as far as the map says. The one call of the system that it makes
        asks whether the daemon is still there."""
        link = self._flows.link
        index: Any = None if link is None or link.closed else link.welcome.index
        known = self._flows.state.namespaces.get(namespace_id)
        if index is None or known is None or known.number is None or len(keys) > BATCH_KEYS_MAX:
            return ()
        try:
            found: tuple[int, ...] = index.match(known.number, namespace_id, keys, link.peer_fd)
        except (TypeError, ValueError):
            # The daemon says what is wrong with a key.
            return ()
        return found
