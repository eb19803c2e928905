"""What both clients say of their present link: settings, counters, and the memory that is mapped for its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.client.flows import Flows
from kvstore.client.operations import Operation, Operations
from kvstore.client.options import ClientOptions
from kvstore.client.state import ClientState
from kvstore.core.errors import Unavailable
from kvstore.core.types import Area

if TYPE_CHECKING:
    # It loads numpy, which admin tools start without.
    from kvstore.tiers.versions import Versions


class Linked:
    """Base of the clients: nothing here waits, and nothing connects."""

    def __init__(self, flows: Flows, *, remote: bool) -> None:
        self.flows = flows
        self.remote = remote
        """Whether bytes go over the network: then only put and get carry them."""
        self.operations: Operations = flows.operations
        """Makes the operations that ``run`` and ``post`` take."""

    @property
    def options(self) -> ClientOptions:
        """The settings that it was made with."""
        return self.flows.options

    @property
    def state(self) -> ClientState:
        """Failures, generation and boot id."""
        return self.flows.state

    @property
    def generation(self) -> int:
        """Counts connections from 0; -1 before the first. Views from ``memory`` and places belong to one generation."""
        return self.flows.state.generation

    @property
    def _connection(self) -> Any:
        """The present link, or None: the name that it had before there were flows."""
        return self.flows.link

    @property
    def connected(self) -> bool:
        """Whether the last call left a living connection; a call may still find it gone."""
        link = self.flows.link
        return link is not None and not link.closed

    def failures(self) -> dict[str, int]:
        """Failures that were answered as misses, by "Method:REASON"."""
        return self.flows.state.failures()

    def post(self, operation: Operation[Any]) -> None:
        """Send an operation whose answer nobody needs. A failure is counted."""
        self.flows.post(operation)

    def memory_at(self, generation: int) -> Callable[[Area], memoryview]:
        """What finds areas of one connection. Raises Unavailable if it is not the present one any more.

        Places are looked up in the memory that they came with: after a reconnect the same offset is someone else's.
        """
        link = self.flows.link
        if link is None or link.generation != generation:
            raise Unavailable("the connection was lost, and its places with it", field="generation", value=generation)
        view: Callable[[Area], memoryview] = link.welcome.arenas.view
        return view

    def versions(self, area: Area) -> Versions:
        """See ``Cache``."""
        link = self.flows.link
        found = None if link is None else link.welcome.arenas.versions.get(area)
        if found is None:
            raise Unavailable(f"{area.name} is not mapped by this session, or has no versions", field="area")
        versions: Versions = found
        return versions

    def alive(self, generation: int) -> bool:
        """See ``Cache``."""
        link = self.flows.link
        if link is None or link.generation != generation:
            return False
        link.pump()
        return not link.closed

    def plan_bell(self) -> int:
        """See ``Cache``."""
        link = self.flows.link
        if link is None or link.welcome.bell is None:
            raise Unavailable("this session has no bell: it has no buffer, or the daemon reads no plans", field="plan")
        bell: int = link.welcome.bell.another()
        return bell
